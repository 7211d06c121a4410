"""What the bytes of each WeightKind mean: blocks to float32, and float32 to the kinds that weights are repacked to.
The layouts are GGUF's; the less common ones are read in `block_numbers.py`. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.block_numbers import block_numbers, has_block_numbers
from twostroke.models.weights.tensor import WeightKind

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

SLAB_VALUES = 1 << 18
"""Values handled at a time: temporaries stay in the cache, and are small beside the result."""

# One block of each kind, as it lies in the file.
_Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", 32)])
_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
_Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", 12), ("nibbles", "u1", (4, 32))])
_Q5_K = np.dtype(
    [("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", 12), ("high_bits", "u1", 32), ("nibbles", "u1", (4, 32))]
)
_Q6_K = np.dtype([("nibbles", "u1", (2, 64)), ("high_bits", "u1", (2, 32)), ("scales", "i1", 16), ("scale", "<f2")])


def dequantise(kind: WeightKind, data: Bytes) -> Float32:
    """[rows, bytes a row] to a new array [rows, values a row]."""
    rows, row_bytes = data.shape
    if data.dtype != np.uint8 or row_bytes % kind.block_bytes:
        raise ValueError(f"a row of {row_bytes} bytes ({data.dtype}) holds no whole number of {kind.name} blocks")
    row_values = row_bytes // kind.block_bytes * kind.block_values
    result = np.empty((rows, row_values), dtype=np.float32)
    decode = _decoder(kind)
    slab_rows = max(1, SLAB_VALUES // max(1, row_values))
    with np.errstate(invalid="ignore", over="ignore"):  # a corrupt scale gives nan or inf, and is found by its user
        for start in range(0, rows, slab_rows):
            slab = np.ascontiguousarray(data[start : start + slab_rows])
            values = result[start : start + slab_rows].reshape(-1, kind.block_values)
            decode(slab.reshape(-1, kind.block_bytes), values)
    return result


def quantise(kind: WeightKind, values: Float32) -> Bytes:
    """[rows, values a row], all finite, to [rows, bytes a row]: Q8_0, Q4_0 and Q4_1."""
    rows, row_values = values.shape
    if kind not in _ENCODERS:
        raise ValueError(f"there is no quantiser to {kind.name}; there are: {', '.join(k.name for k in _ENCODERS)}")
    if row_values % kind.block_values:
        raise ValueError(f"a row of {row_values} values is not a multiple of {kind.name}'s {kind.block_values}")
    result = np.empty((rows, kind.row_bytes(row_values)), dtype=np.uint8)
    encode = _ENCODERS[kind]
    slab_rows = max(1, SLAB_VALUES // max(1, row_values))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for start in range(0, rows, slab_rows):
            slab = np.ascontiguousarray(values[start : start + slab_rows], dtype=np.float32)
            blocks = encode(slab.reshape(-1, kind.block_values))
            result[start : start + slab_rows] = blocks.view(np.uint8).reshape(len(slab), -1)
    return result


def _decoder(kind: WeightKind) -> Callable[[Bytes, Float32], None]:
    if has_block_numbers(kind):
        return lambda blocks, values: block_numbers(kind, blocks).write_values(values)
    return _DECODERS[kind]


# Decoders: blocks [n, bytes a block] into values [n, values a block].


def _decode_f32(blocks: Bytes, values: Float32) -> None:
    values[:] = blocks.view("<f4")


def _decode_f16(blocks: Bytes, values: Float32) -> None:
    values[:] = blocks.view("<f2")


def _decode_bf16(blocks: Bytes, values: Float32) -> None:
    """The upper half of a float32."""
    bits = values.view(np.uint32)
    bits[:] = blocks.view("<u2")
    bits <<= 16


def _decode_q8_0(blocks: Bytes, values: Float32) -> None:
    block = blocks.view(_Q8_0)[:, 0]
    values[:] = block["quants"]
    values *= _column(block["scale"])


def _decode_q4_0(blocks: Bytes, values: Float32) -> None:
    block = blocks.view(_Q4_0)[:, 0]
    _spread_nibbles(block["nibbles"], values)
    values -= 8
    values *= _column(block["scale"])


def _decode_q4_1(blocks: Bytes, values: Float32) -> None:
    block = blocks.view(_Q4_1)[:, 0]
    _spread_nibbles(block["nibbles"], values)
    values *= _column(block["scale"])
    values += _column(block["minimum"])


def _decode_q4_k(blocks: Bytes, values: Float32) -> None:
    block = blocks.view(_Q4_K)[:, 0]
    pairs = values.reshape(-1, 4, 2, 32)  # 32 bytes hold two sub-blocks: one in the low nibbles, one in the high
    pairs[:, :, 0] = block["nibbles"] & 15
    pairs[:, :, 1] = block["nibbles"] >> 4
    _apply_sub_scales(block, values.reshape(-1, 8, 32))


def _decode_q5_k(blocks: Bytes, values: Float32) -> None:
    block = blocks.view(_Q5_K)[:, 0]
    sub_blocks = values.reshape(-1, 8, 32)
    for index in range(8):  # bit `index` of each byte is the fifth bit of sub-block `index`
        low = (block["nibbles"][:, index // 2] >> (4 * (index % 2))) & 15
        sub_blocks[:, index] = low | (((block["high_bits"] >> index) & 1) << 4)
    _apply_sub_scales(block, sub_blocks)


def _decode_q6_k(blocks: Bytes, values: Float32) -> None:
    block = blocks.view(_Q6_K)[:, 0]
    quarters = values.reshape(-1, 2, 4, 32)  # each half of the block: 64 bytes of low bits, 32 bytes of high pairs
    for index in range(4):
        first = 32 * (index % 2)
        low = (block["nibbles"][:, :, first : first + 32] >> (4 * (index // 2))) & 15
        quarters[:, :, index] = low | (((block["high_bits"] >> (2 * index)) & 3) << 4)
    values -= 32
    scales = _column(block["scale"]) * block["scales"].astype(np.float32)  # [n, 16], one each 16 values
    groups = values.reshape(-1, 16, 16)
    groups *= scales[:, :, None]


def _apply_sub_scales(block: npt.NDArray[np.void], sub_blocks: Float32) -> None:
    """Q4_K and Q5_K: value = scale * sub_scale * quant - minimum * sub_minimum, over sub_blocks [n, 8, 32].

    The twelve packed bytes hold eight 6-bit scales and eight 6-bit minima. Bytes 0-3 are scales 0-3 and bytes 4-7 are
    minima 0-3, each with two spare bits on top; bytes 8-11 hold the low nibbles of scales 4-7 and, above, of minima
    4-7, whose top two bits are those spare ones."""
    first, second, last = block["packed"][:, :4], block["packed"][:, 4:8], block["packed"][:, 8:]
    scales = np.concatenate([first & 63, (last & 15) | ((first >> 6) << 4)], axis=1).astype(np.float32)
    minima = np.concatenate([second & 63, (last >> 4) | ((second >> 6) << 4)], axis=1).astype(np.float32)
    scales *= _column(block["scale"])
    minima *= _column(block["minimum"])
    sub_blocks *= scales[:, :, None]
    sub_blocks -= minima[:, :, None]


def _spread_nibbles(nibbles: Bytes, values: Float32) -> None:
    """[n, 16] bytes to [n, 32]: the low nibbles are the first half of the block, the high ones the second."""
    values[:, :16] = nibbles & 15
    values[:, 16:] = nibbles >> 4


def _column(halves: npt.NDArray[np.float16]) -> Float32:
    """[n] to [n, 1] in float32."""
    return halves.astype(np.float32)[:, None]


# Encoders: values [n, values a block] to blocks [n].


def _encode_q8_0(values: Float32) -> npt.NDArray[np.void]:
    scale = np.abs(values).max(axis=1) / np.float32(127)
    scaled = values * _reciprocal(scale)[:, None]
    block = np.empty(len(values), dtype=_Q8_0)
    block["scale"] = scale
    whole = np.trunc(scaled)
    # Halves are rounded away from zero, unlike np.round. Adding 0.5 first would itself round, just below a half.
    block["quants"] = whole + np.trunc(2 * (scaled - whole))
    return block


def _encode_q4_0(values: Float32) -> npt.NDArray[np.void]:
    """The value of largest magnitude becomes -8 exactly, whatever its sign."""
    largest = np.abs(values).argmax(axis=1)
    scale = values[np.arange(len(values)), largest] / np.float32(-8)
    block = np.empty(len(values), dtype=_Q4_0)
    block["scale"] = scale
    block["nibbles"] = _pack_nibbles(values * _reciprocal(scale)[:, None] + np.float32(8.5))
    return block


def _encode_q4_1(values: Float32) -> npt.NDArray[np.void]:
    minimum = values.min(axis=1)
    scale = (values.max(axis=1) - minimum) / np.float32(15)
    block = np.empty(len(values), dtype=_Q4_1)
    block["scale"] = scale
    block["minimum"] = minimum
    block["nibbles"] = _pack_nibbles((values - minimum[:, None]) * _reciprocal(scale)[:, None] + np.float32(0.5))
    return block


def _pack_nibbles(quants: Float32) -> Bytes:
    """[n, 32] numbers, truncated and kept within 0 to 15, to [n, 16] bytes."""
    whole = np.clip(quants, 0, 15).astype(np.uint8)
    packed: Bytes = whole[:, :16] | (whole[:, 16:] << np.uint8(4))
    return packed


def _reciprocal(scale: Float32) -> Float32:
    """1 / scale, and 0 where that is not finite: such a scale is 0 in float16 too."""
    inverse = np.float32(1) / scale
    inverse[~np.isfinite(inverse)] = 0
    return inverse


_DECODERS: dict[WeightKind, Callable[[Bytes, Float32], None]] = {
    WeightKind.F32: _decode_f32,
    WeightKind.F16: _decode_f16,
    WeightKind.BF16: _decode_bf16,
    WeightKind.Q8_0: _decode_q8_0,
    WeightKind.Q4_0: _decode_q4_0,
    WeightKind.Q4_1: _decode_q4_1,
    WeightKind.Q4_K: _decode_q4_k,
    WeightKind.Q5_K: _decode_q5_k,
    WeightKind.Q6_K: _decode_q6_k,
}

_ENCODERS: dict[WeightKind, Callable[[Float32], npt.NDArray[np.void]]] = {
    WeightKind.Q8_0: _encode_q8_0,
    WeightKind.Q4_0: _encode_q4_0,
    WeightKind.Q4_1: _encode_q4_1,
}
