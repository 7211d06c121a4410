"""The small integers that blocks of the less common kinds hold, and the scales that go with them. A dequantiser
multiplies them out; a backend may repack them without rounding anything twice. The layouts are GGUF's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.iq_grids import grid
from twostroke.models.weights.tensor import WeightKind

Bytes = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int8]
Float32 = npt.NDArray[np.float32]

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_LEVELS = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1 doubled: sign, two bits of exponent, one of mantissa."""
_PAIR_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)
_BIT_SHIFTS = np.arange(8, dtype=np.uint8)
_SIGNS_OF_SEVEN_BITS = np.array([low | (low.bit_count() & 1) << 7 for low in range(128)], dtype=np.uint8)
"""Eight signs stored as seven: an even number of them is negative."""


@dataclass(frozen=True, slots=True)
class BlockNumbers:
    """value = integer * scale + minimum; scales and minimums hold for equal runs of a block's integers."""

    integers: Integers  # [n, values a block]
    scales: Float32  # [n, runs]
    minimums: Float32 | None = None  # [n, runs]

    def write_values(self, values: Float32) -> None:
        """# values [n, values a block]"""
        values[:] = self.integers
        runs = values.reshape(*self.scales.shape, -1)
        runs *= self.scales[..., None]
        if self.minimums is not None:
            runs += self.minimums[..., None]


def block_numbers(kind: WeightKind, blocks: Bytes) -> BlockNumbers:
    """# blocks [n, bytes a block], contiguous"""
    return _READERS[kind](blocks)


def has_block_numbers(kind: WeightKind) -> bool:
    return kind in _READERS


def q3_k_scales(blocks: Bytes) -> Integers:
    """[n, 16], -32 to 31: eight bytes hold their low nibbles, those of the first eight below; four the pairs above."""
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = ((packed[:, None, 8:] >> _PAIR_SHIFTS[:, None]) & 3).reshape(-1, 16)
    scales: Integers = (low | (high << 4)).astype(np.int8)
    scales -= 32
    return scales


def _q5_0(blocks: Bytes) -> BlockNumbers:
    return BlockNumbers(_five_bits(blocks[:, 2:]) - np.int8(16), _halves(blocks[:, :2]))


def _q5_1(blocks: Bytes) -> BlockNumbers:
    return BlockNumbers(_five_bits(blocks[:, 4:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _five_bits(packed: Bytes) -> Integers:
    """[n, 20] to [n, 32]: bit i of the first four bytes is the fifth of value i; nibbles as Q4_0's."""
    high = _bits(packed[:, :4])
    numbers: Integers = (_nibbles(packed[:, 4:]) | (high << 4)).view(np.int8)
    return numbers


def _q2_k(blocks: Bytes) -> BlockNumbers:
    packed, whole = blocks[:, :16], _halves(blocks[:, 80:])
    scales = whole[:, :1] * (packed & 15).astype(np.float32)
    minimums = whole[:, 1:] * (packed >> 4).astype(np.float32)
    return BlockNumbers(_pairs(blocks[:, 16:80]).view(np.int8), scales, -minimums)


def _q3_k(blocks: Bytes) -> BlockNumbers:
    high = (blocks[:, None, :32] >> _BIT_SHIFTS[:, None]) & 1  # bit i of byte b: the third of value 32 * i + b
    numbers = (_pairs(blocks[:, 32:96]) | (high.reshape(-1, 256) << 2)).view(np.int8) - np.int8(4)
    return BlockNumbers(numbers, _halves(blocks[:, 108:]) * q3_k_scales(blocks).astype(np.float32))


def _pairs(packed: Bytes) -> Bytes:
    """[n, 64] to [n, 256]: 32 bytes hold four runs of 32 values, the first in the lowest pairs of bits."""
    runs: Bytes = (packed.reshape(-1, 2, 1, 32) >> _PAIR_SHIFTS[:, None]) & np.uint8(3)
    return runs.reshape(-1, 256)


def _iq4_nl(blocks: Bytes) -> BlockNumbers:
    return BlockNumbers(_looked_up(IQ4_LEVELS, _nibbles(blocks[:, 2:])), _halves(blocks[:, :2]))


def _iq4_xs(blocks: Bytes) -> BlockNumbers:
    high = (_words(blocks[:, 2:4], "<u2") >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (_in_order(blocks[:, 4:8]) | (high.astype(np.uint8) << 4)).astype(np.int8) - np.int8(32)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 16)).reshape(len(blocks), 256)
    return BlockNumbers(_looked_up(IQ4_LEVELS, codes), _halves(blocks[:, :2]) * scales.astype(np.float32))


def _mxfp4(blocks: Bytes) -> BlockNumbers:
    exponents = blocks[:, :1].astype(np.uint32)  # of two, from -127 on; one less here, since the levels are doubled
    small = np.uint32(0x00200000) << np.minimum(exponents, 1)
    bits = np.where(exponents < 2, small, (exponents - (exponents > 0)) << 23)
    return BlockNumbers(_looked_up(FP4_LEVELS, _nibbles(blocks[:, 1:])), bits.astype(np.uint32).view(np.float32))


def _nvfp4(blocks: Bytes) -> BlockNumbers:
    """Four runs of 16 values with a scale of E4M3 each, halved since the levels are doubled."""
    packed = blocks[:, :4]
    exponents, mantissas = (packed >> 3 & 15).astype(np.float32), (packed & 7).astype(np.float32)
    scales = np.where(exponents == 0, mantissas * 2**-10, (8 + mantissas) * np.exp2(exponents - 11)).astype(np.float32)
    scales[packed == 0x7F] = 0
    runs = blocks[:, 4:].reshape(-1, 4, 8)
    codes = np.concatenate([runs & 15, runs >> 4], axis=-1).reshape(-1, 64)
    return BlockNumbers(_looked_up(FP4_LEVELS, codes), scales)


def _tq1_0(blocks: Bytes) -> BlockNumbers:
    """Five values of three levels a byte, as a fraction of 256 in base three; the last four bytes hold four each."""
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:, None]
    parts = (blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4])
    digits = np.concatenate([part.reshape(len(blocks), -1) for part in parts], axis=1).astype(np.uint16)
    return BlockNumbers((digits * 3 >> 8).astype(np.int8) - np.int8(1), _halves(blocks[:, 52:]))


def _tq2_0(blocks: Bytes) -> BlockNumbers:
    return BlockNumbers(_pairs(blocks[:, :64]).view(np.int8) - np.int8(1), _halves(blocks[:, 64:]))


def _iq2_xxs(blocks: Bytes) -> BlockNumbers:
    """Of each 32 values: four indexes of a byte, then a word of four times seven signs and a scale."""
    words = _words(blocks[:, 2:], "<u4").reshape(-1, 8, 2)
    indexes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    scales = _halves(blocks[:, :2]) * (np.float32(0.5) + (words[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return BlockNumbers(_signed(grid("IQ2_XXS")[indexes], _signs_in_words(words[..., 1])), scales)


def _iq2_xs(blocks: Bytes) -> BlockNumbers:
    words = _words(blocks[:, 2:66], "<u2")
    scales = _halves(blocks[:, :2]) * (np.float32(0.5) + _in_order(blocks[:, 66:])) * np.float32(0.25)
    return BlockNumbers(_signed(grid("IQ2_XS")[words & 511], _SIGNS_OF_SEVEN_BITS[words >> 9]), scales)


def _iq2_s(blocks: Bytes) -> BlockNumbers:
    high = ((blocks[:, 66:74, None] >> _PAIR_SHIFTS) & 3).reshape(-1, 32).astype(np.uint16)
    scales = _halves(blocks[:, :2]) * (np.float32(0.5) + _in_order(blocks[:, 74:])) * np.float32(0.25)
    return BlockNumbers(_signed(grid("IQ2_S")[blocks[:, 2:34] | (high << 8)], blocks[:, 34:66]), scales)


def _iq3_xxs(blocks: Bytes) -> BlockNumbers:
    words = _words(blocks[:, 66:], "<u4")
    scales = _halves(blocks[:, :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return BlockNumbers(_signed(grid("IQ3_XXS")[blocks[:, 2:66]], _signs_in_words(words)), scales)


def _iq3_s(blocks: Bytes) -> BlockNumbers:
    high = _bits(blocks[:, 66:74]).astype(np.uint16)
    scales = _halves(blocks[:, :2]) * (1 + 2 * _in_order(blocks[:, 106:])).astype(np.float32)
    return BlockNumbers(_signed(grid("IQ3_S")[blocks[:, 2:66] | (high << 8)], blocks[:, 74:106]), scales)


def _iq1_s(blocks: Bytes) -> BlockNumbers:
    """An eighth is added to each of 32 values of -1, 0 and 1, or taken away: as integers, eight times the value."""
    words = _words(blocks[:, 34:], "<u2")
    high = ((words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7).reshape(-1, 32)
    scales = _halves(blocks[:, :2]) * (2 * (words >> 12 & 7) + 1).astype(np.float32)
    moved = np.where(words & 0x8000, -1, 1).astype(np.int8)
    integers = 8 * grid("IQ1")[blocks[:, 2:34] | (high << 8)].reshape(-1, 8, 32) + moved[..., None]
    return BlockNumbers(integers.reshape(-1, 256), scales * np.float32(0.125))


def _iq1_m(blocks: Bytes) -> BlockNumbers:
    """As IQ1_S; the four bits of the block's scale that each word of scales has on top make up an f16."""
    words = _words(blocks[:, 48:], "<u2")
    parts = (words & 0xF000) >> np.arange(12, -1, -4, dtype=np.uint16)
    whole = np.bitwise_or.reduce(parts, axis=1, keepdims=True).astype("<u2").view("<f2").astype(np.float32)
    scales = ((words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7).reshape(-1, 16)
    high = _in_order(blocks[:, 32:48])  # three bits of an index, and whether the eighth is taken away
    moved = np.where(high & 8, -1, 1).astype(np.int8)
    integers = 8 * grid("IQ1")[blocks[:, :32] | ((high & 7).astype(np.uint16) << 8)] + moved[..., None]
    return BlockNumbers(integers.reshape(-1, 256), whole * (2 * scales + 1).astype(np.float32) * np.float32(0.125))


def _signs_in_words(words: npt.NDArray[np.integer]) -> Bytes:
    """[n, words] to [n, 4 * words] bytes of signs"""
    found: Bytes = _SIGNS_OF_SEVEN_BITS[(words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127]
    return found.reshape(len(words), -1)


def _signed(magnitudes: Integers, signs: Bytes) -> Integers:
    """magnitudes [n, entries, values an entry], signs [n, values / 8], to [n, values]"""
    values = magnitudes.reshape(len(magnitudes), -1)
    return np.where(_bits(signs), -values, values)


def _bits(packed: Bytes) -> Bytes:
    """[n, bytes] to [n, 8 * bytes], the lowest first"""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _nibbles(packed: Bytes) -> Bytes:
    """[n, 16] to [n, 32]: the low nibbles are the first half of the values, the high ones the second."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _in_order(packed: Bytes) -> Bytes:
    """[n, bytes] to [n, 2 * bytes]: of each byte the low nibble, then the high one."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)


def _looked_up(levels: tuple[int, ...], codes: Bytes) -> Integers:
    return np.array(levels, dtype=np.int8)[codes]


def _words(packed: Bytes, kind: str) -> npt.NDArray[np.integer]:
    return np.ascontiguousarray(packed).view(kind)


def _halves(packed: Bytes) -> Float32:
    """[n, 2 * count] to [n, count]"""
    return np.ascontiguousarray(packed).view("<f2").astype(np.float32)


_READERS: dict[WeightKind, Callable[[Bytes], BlockNumbers]] = {
    WeightKind.Q5_0: _q5_0,
    WeightKind.Q5_1: _q5_1,
    WeightKind.Q2_K: _q2_k,
    WeightKind.Q3_K: _q3_k,
    WeightKind.IQ1_S: _iq1_s,
    WeightKind.IQ1_M: _iq1_m,
    WeightKind.IQ2_XXS: _iq2_xxs,
    WeightKind.IQ2_XS: _iq2_xs,
    WeightKind.IQ2_S: _iq2_s,
    WeightKind.IQ3_XXS: _iq3_xxs,
    WeightKind.IQ3_S: _iq3_s,
    WeightKind.IQ4_NL: _iq4_nl,
    WeightKind.IQ4_XS: _iq4_xs,
    WeightKind.TQ1_0: _tq1_0,
    WeightKind.TQ2_0: _tq2_0,
    WeightKind.MXFP4: _mxfp4,
    WeightKind.NVFP4: _nvfp4,
}
