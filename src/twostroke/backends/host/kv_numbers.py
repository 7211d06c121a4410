"""Keys, values and latents as numbers, in the kinds that backends store them in: `float32`, `float16`, `bfloat16`, and
`int8` with scales. From one kind to another: a kind to itself changes nothing, and more bits to fewer round. Knows no
block and no order of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.weights.small_floats import bfloat16_values
from twostroke.models.weights.write_safetensors import bfloat16

Float32 = npt.NDArray[np.float32]

ELEMENTS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "int8": np.int8}
"""What numpy holds a kind's numbers in: 16 bits without a sign stand for bfloat16."""
LARGEST_FLOAT16, LARGEST_INT8 = 65504.0, 127.0
LARGEST_BFLOAT16 = float(bfloat16_values(np.array([0x7F7F]))[0])
STEPS_A_DOUBLING = 512
"""Of the logarithms that stand for scales of values."""
_SMALLEST_TOP = 1e-15


@dataclass(frozen=True, slots=True)
class Numbers:
    """What layers leave behind of some tokens."""

    kind: str
    values: npt.NDArray[Any]
    """[layers, parts, positions, heads, numbers]; parts: keys and values, or latents alone."""
    scales: npt.NDArray[Any] | None = None
    """[layers, parts, positions, heads], 16 bits each. Of keys a bfloat16, of values its logarithm to the base of 2, in
    steps. None: the kind has none."""

    def positions(self, start: int, end: int) -> Numbers:
        own = slice(start, end)
        return Numbers(self.kind, self.values[:, :, own], None if self.scales is None else self.scales[:, :, own])


def joined(runs: Sequence[Numbers]) -> Numbers:
    """Of one kind, one behind the other."""
    if len(runs) == 1:
        return runs[0]
    scales = [one.scales for one in runs if one.scales is not None]
    return Numbers(
        runs[0].kind,
        np.concatenate([one.values for one in runs], axis=2),
        np.concatenate(scales, axis=2) if scales else None,
    )


def of_kind(numbers: Numbers, kind: str) -> Numbers:
    return numbers if numbers.kind == kind else from_floats(to_floats(numbers), kind)


def to_floats(numbers: Numbers) -> Float32:
    match numbers.kind:
        case "bfloat16":
            return bfloat16_values(numbers.values)
        case "int8":
            assert numbers.scales is not None
            keys = bfloat16_values(numbers.scales[:, 0])
            values = np.exp2(numbers.scales[:, 1].view(np.int16).astype(np.float32) / np.float32(STEPS_A_DOUBLING))
            scales = np.stack([keys, values], axis=1)[..., None]
            floats: Float32 = numbers.values.astype(np.float32) * scales
            return floats
        case _:
            return np.asarray(numbers.values, dtype=np.float32)


def from_floats(values: Float32, kind: str) -> Numbers:
    """Finite, whatever comes: a block may hold nothing else."""
    match kind:
        case "float16":
            return Numbers(kind, _finite(values, LARGEST_FLOAT16).astype(np.float16))
        case "bfloat16":
            return Numbers(kind, bfloat16(_finite(values, LARGEST_BFLOAT16)))
        case "int8":
            return _to_int8(_finite(values, LARGEST_FLOAT16))
        case _:
            return Numbers(kind, _finite(values, float(np.finfo(np.float32).max)))


def _finite(values: Float32, largest: float) -> Float32:
    found: Float32 = np.nan_to_num(values, nan=0.0, posinf=largest, neginf=-largest)
    return np.clip(found, np.float32(-largest), np.float32(largest))


def _to_int8(values: Float32) -> Numbers:
    """Scales are rounded up, so that no number is beyond the largest."""
    scales = np.maximum(np.abs(values).max(axis=-1), np.float32(_SMALLEST_TOP)) / np.float32(LARGEST_INT8)
    key_bits = ((scales[:, 0].view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(np.uint16)
    value_logs = np.ceil(np.log2(scales[:, 1].astype(np.float64)) * STEPS_A_DOUBLING).astype(np.int16)
    stored = np.stack([key_bits, value_logs.view(np.uint16)], axis=1)
    used = np.stack(
        [bfloat16_values(key_bits), np.exp2(value_logs.astype(np.float32) / np.float32(STEPS_A_DOUBLING))], axis=1
    )
    codes = np.clip(np.rint(values / used[..., None]), -LARGEST_INT8, LARGEST_INT8).astype(np.int8)
    return Numbers("int8", codes, stored)
