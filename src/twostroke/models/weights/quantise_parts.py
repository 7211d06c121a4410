"""Floats to the forms that store scales apart: four bits by groups, rounded to the nearest after a search of the range
that is worth covering; and E4M3 by rows. What is read from files is in `stored_layouts.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.small_floats import E4M3_MOST, to_e4m3
from twostroke.models.weights.stored_forms import Parts, ScaleKind, pack_nibbles
from twostroke.models.weights.tensor import WeightKind

Float32 = npt.NDArray[np.float32]

GROUPS = (128, 64, 32)
"""Inputs that share a scale: the first of these that divides a row."""
CLIPS = tuple(1 - step / 40 for step in range(13))
"""Of a group's largest value: what lies beyond is cut off, where that makes the sum of squared errors smaller."""
_SLAB_VALUES = 1 << 19
"""Tried at a time: the search goes over them many times, and finds them in the cache."""


def quantise_parts(kind: WeightKind, values: Float32) -> Parts:
    """[rows, inputs], all finite, to INT4 or FP8."""
    if kind not in _QUANTISERS:
        raise ValueError(f"there is no quantiser to {kind.name}; there are: {', '.join(k.name for k in _QUANTISERS)}")
    return _QUANTISERS[kind](values)


def group_of(inputs: int) -> int:
    """How many inputs of a row share a scale."""
    found = next((size for size in GROUPS if inputs % size == 0), None)
    if found is None:
        raise ValueError(f"a row of {inputs} values is no multiple of {GROUPS[-1]}, the least that share a scale")
    return found


def _int4(values: Float32) -> Parts:
    """Symmetric: codes of 1 to 15 about the middle, whose largest is the value of largest magnitude that is covered.
    Scales are rounded to f16 before codes are chosen, so that codes suit them."""
    rows, inputs = values.shape
    group = group_of(inputs)
    groups = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, group)
    scales = np.empty(len(groups), dtype=np.float16)
    codes = np.empty(groups.shape, dtype=np.uint8)
    step = max(1, _SLAB_VALUES // group)
    for first in range(0, len(groups), step):
        part = groups[first : first + step]
        scales[first : first + step] = _best_scales(part)
        numbers = _rounded(part, scales[first : first + step].astype(np.float32))
        codes[first : first + step] = (numbers + 8).astype(np.uint8)
    packed = pack_nibbles(codes.reshape(rows, inputs))
    by_row = scales.reshape(rows, -1)
    return Parts(WeightKind.INT4, (rows, inputs), packed, by_row, ScaleKind.F16, 1, group)


def _best_scales(groups: Float32) -> npt.NDArray[np.float16]:
    largest = np.abs(groups).max(axis=1)
    best = np.full(len(groups), np.inf, dtype=np.float32)
    found = np.zeros(len(groups), dtype=np.float16)
    for clip in CLIPS:
        halves = (largest * np.float32(clip / 7)).astype(np.float16)
        scales = halves.astype(np.float32)
        error = _rounded(groups, scales)
        error *= scales[:, None]
        error -= groups
        squares = np.einsum("ij,ij->i", error, error)
        is_better = squares < best
        best[is_better], found[is_better] = squares[is_better], halves[is_better]
    return found


def _rounded(groups: Float32, scales: Float32) -> Float32:
    """-8 to 7; nothing but 0 where a scale is too small to be one."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inverse = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
    numbers: Float32 = np.rint(groups * inverse[:, None].astype(np.float32))
    return np.clip(numbers, -8, 7, out=numbers)


def _fp8(values: Float32) -> Parts:
    """A scale for each row, which brings its largest value to the largest code."""
    rows, inputs = values.shape
    codes = np.empty((rows, inputs), dtype=np.uint8)
    scales = np.empty((rows, 1), dtype=np.float32)
    step = max(1, _SLAB_VALUES // max(1, inputs))
    for first in range(0, rows, step):
        part = np.asarray(values[first : first + step], dtype=np.float32)
        own: Float32 = np.abs(part).max(axis=1, keepdims=True) / np.float32(E4M3_MOST)
        scales[first : first + step] = own
        own[own == 0] = 1
        codes[first : first + step] = to_e4m3(part / own)
    return Parts(WeightKind.FP8, (rows, inputs), codes, scales, ScaleKind.F32, 1, inputs)


_QUANTISERS: dict[WeightKind, Callable[[Float32], Parts]] = {WeightKind.INT4: _int4, WeightKind.FP8: _fp8}
