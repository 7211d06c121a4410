"""Weights whose scales are stored apart, to the kinds of block that have a tile. Where a block can hold them, codes
keep their values and scales are rounded to f16; else the weights are rounded to 8 bits, with a scale for each 32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.memory import Bytes, Scalar
from twostroke.backends.cpu.row_numbers import RowNumbers
from twostroke.backends.cpu.tile_kinds import GROUP_VALUES
from twostroke.models.weights.quantisation import quantise
from twostroke.models.weights.stored_forms import Parts, ScaledTensor, ScaleKind, unpack_nibbles
from twostroke.models.weights.tensor import WeightKind

_KEPT = {
    WeightKind.INT4: WeightKind.Q4_0,
    WeightKind.INT8: WeightKind.Q8_0,
    WeightKind.MXFP4_PARTS: WeightKind.MXFP4,
    WeightKind.NVFP4_PARTS: WeightKind.NVFP4,
}
"""The kind of block whose numbers are the same."""
_ROUNDED_TO = WeightKind.Q8_0
_EXACT_SCALES = (ScaleKind.F16, ScaleKind.E8M0)


def block_kind(parts: Parts) -> WeightKind:
    """What parts are held in; their codes need not be there."""
    if _why_rounded(parts) is not None:
        return _ROUNDED_TO
    if parts.kind is WeightKind.INT4 and parts.zeros is not None:
        return WeightKind.Q4_1
    return _KEPT[parts.kind]


def _why_rounded(parts: Parts) -> str | None:
    """None: a block holds each code as it is."""
    if parts.kind is WeightKind.FP8:
        return ""
    if parts.group_of_input is not None:
        return " with inputs in an order of their own"
    if parts.kind is WeightKind.INT8 and parts.zeros is not None:
        return " with zero points"
    per_block = GROUP_VALUES // 2 if parts.kind is WeightKind.NVFP4_PARTS else GROUP_VALUES
    if parts.group_size % per_block and parts.group_size != parts.shape[1]:
        return f" in groups of {parts.group_size}"
    return None


def parts_note(tensor: ScaledTensor, held_bits: float) -> str:
    """What a user should know of a tensor that is held so."""
    parts, size = tensor.outline, f"{held_bits:.5g} bits a weight"
    why = _why_rounded(parts)
    if why is not None:
        return f"{tensor.kind.name}{why} rounded to {_ROUNDED_TO.name} ({size})"
    is_exact = parts.scale_kind in _EXACT_SCALES and parts.zeros is None
    scales = "exactly" if is_exact else "scales rounded to f16"
    return f"{tensor.kind.name} repacked to {block_kind(parts).name} ({size}, {scales})"


def repacked(parts: Parts) -> Bytes | RowNumbers:
    """[rows, bytes a row] of blocks, or for a kind whose blocks could not hold the scales the numbers of its tile."""
    kind = block_kind(parts)
    if _why_rounded(parts) is not None:
        return quantise(_ROUNDED_TO, parts.to_float32())
    with np.errstate(over="ignore", invalid="ignore"):
        return _REPACKERS[kind](parts)


def _q4_0(parts: Parts) -> Bytes:
    return _blocks(_halves(_scales(parts)), _split_nibbles(parts.codes))


def _q4_1(parts: Parts) -> Bytes:
    """A code less its zero point, times the scale: so the least weight is that of code 0."""
    assert parts.zeros is not None
    scales = parts.scale_values()
    minimums: npt.NDArray[np.float32] = -parts.zeros.astype(np.float32) * _by_row(parts, scales)
    spread = _spread(parts, minimums)
    return _blocks(_halves(_scales(parts)), _halves(spread), _split_nibbles(parts.codes))


def _q8_0(parts: Parts) -> Bytes:
    codes = parts.codes.reshape(parts.shape[0], -1, GROUP_VALUES) ^ np.uint8(128)
    return _blocks(_halves(_scales(parts)), codes)


def _mxfp4(parts: Parts) -> Bytes:
    exponents = _spread(parts, _by_row(parts, parts.scales.astype(np.uint8)))
    return _blocks(exponents[..., None], _split_nibbles(parts.codes))


def _nvfp4(parts: Parts) -> RowNumbers:
    """Levels are doubled in a tile, and scales halved."""
    rows = parts.shape[0]
    numbers = unpack_nibbles(parts.codes).reshape(rows, -1, GROUP_VALUES)
    halved = _by_row(parts, parts.scale_values()) * np.float32(0.5)
    return RowNumbers(np.ascontiguousarray(numbers), halved.reshape(rows, -1, 2).astype("<f2"))


def _scales(parts: Parts) -> npt.NDArray[np.float32]:
    """[rows, blocks]"""
    return _spread(parts, _by_row(parts, parts.scale_values()))


def _by_row(parts: Parts, scales: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    return np.repeat(scales, parts.rows_per_scale, axis=0)[: parts.shape[0]]


def _spread(parts: Parts, numbers: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """[rows, groups] to [rows, blocks]: a group is several blocks."""
    blocks = parts.shape[1] // GROUP_VALUES
    return np.repeat(numbers, max(1, parts.group_size // GROUP_VALUES), axis=1)[:, :blocks]


def _halves(numbers: npt.NDArray[np.float32]) -> Bytes:
    return numbers.astype("<f2")[..., None].view(np.uint8)


def _split_nibbles(codes: Bytes) -> Bytes:
    """Pairs of neighbours to pairs that are 16 apart, in each 32."""
    spread = unpack_nibbles(codes).reshape(len(codes), -1, GROUP_VALUES)
    packed: Bytes = spread[..., :16] | (spread[..., 16:] << np.uint8(4))
    return packed


def _blocks(*fields: Bytes) -> Bytes:
    """[rows, blocks, bytes] each, side by side."""
    joined = np.concatenate(fields, axis=-1)
    return joined.reshape(len(joined), -1)


_REPACKERS: dict[WeightKind, Callable[[Parts], Bytes | RowNumbers]] = {
    WeightKind.Q4_0: _q4_0,
    WeightKind.Q4_1: _q4_1,
    WeightKind.Q8_0: _q8_0,
    WeightKind.MXFP4: _mxfp4,
    WeightKind.NVFP4: _nvfp4,
}
