"""Tensors as files hold them to the forms that keep their numbers and scales, put where products look for them. No
number and no scale is rounded. Which form a matrix has is `stored_codes.py`'s to say; `file_numbers.py` reads files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from twostroke.backends.cuda.file_numbers import BLOCK_OF_256, Numbers, nibbles, numbers_of, on_device
from twostroke.backends.cuda.kernels.eight_bits import EightBitMatrix
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits, SmallFloatUnits
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, GroupValues
from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH, MX_UNITS, UNIT_ROWS, Offset
from twostroke.backends.cuda.matrix import LowBitMatrix
from twostroke.backends.cuda.stored_codes import order_of
from twostroke.core.errors import ModelError
from twostroke.models.weights.stored_forms import Parts, ScaledTensor
from twostroke.models.weights.tensor import WeightTensor

SLICE_VALUES = 1 << 25


def fill_stored(place: LowBitMatrix, tensors: Sequence[WeightTensor]) -> None:
    """From tensors that are joined by rows, into a form that has a code for them. A large head comes in slices: what a
    tensor is spread out to takes many times its bytes."""
    device = place.data.device
    if isinstance(place, GroupedMatrix) and len(tensors) == 1 and not place.is_gated and place.order is None:
        most_rows = max(1, SLICE_VALUES // place.width)
        if place.rows > max(most_rows, UNIT_ROWS):
            for first, part in place.slices(most_rows):
                fill_stored(part, [tensors[0].rows(first, first + part.rows)])
            return
    if isinstance(place, ExpertMatrix):
        _fill_experts(place, tensors)
        return
    if isinstance(place, ExpertUnits):
        each = len(tensors) // len(place.data)
        for expert, matrix in enumerate(place):
            own = tensors[each * expert : each * (expert + 1)]
            if isinstance(matrix, SmallFloatUnits):
                _fill_small_floats(matrix, own)
            else:
                fill_stored(matrix, own)
        return
    if isinstance(place, EightBitMatrix):
        parts = [numbers_of(tensor, device) for tensor in tensors]
        place.put(torch.cat([part.numbers for part in parts]), torch.cat([part.scales[:, 0] for part in parts]))
        return
    found = [_suited(numbers_of(tensor, device).by_groups_of(place.code.group), place) for tensor in tensors]
    if isinstance(place, FourBitMatrix):
        scales = torch.cat([part.scales for part in found])
        _check_finite(tensors, [scales])
        place.put(torch.cat([part.numbers for part in found]), scales)
        return
    numbers = torch.cat([part.numbers for part in found])
    if place.order is not None and (order := order_of(tensors[0])) is not None:
        place.order.copy_(torch.from_numpy(order))
        numbers = numbers[:, place.order]
    values = _joined([_values(part, place) for part in found])
    _check_finite(tensors, [values.scales, values.offsets, values.tops])
    place.put(numbers, values)


def _suited(part: Numbers, place: LowBitMatrix) -> Numbers:
    """Numbers as the form has them: looked up where it has no table, and about its own middle where it has no other."""
    if not isinstance(place, GroupedMatrix):
        return part
    own = place.grouping
    if own.table is None:
        part = part.looked_up()
    if own.offset != "none" or own.is_float8 or part.middle == own.middle:
        return part
    return replace(part, numbers=part.numbers + (own.middle - part.middle), middle=own.middle)


def _fill_experts(place: ExpertMatrix, tensors: Sequence[WeightTensor]) -> None:
    """Of every expert one tensor or two, in the order of its rows."""
    put = _put_small_floats if place.form.levels == "e2m1" else _put_numbers
    start = 0
    for tensor in tensors:
        put(place, start, tensor)
        start += tensor.shape[0]


def _put_numbers(place: ExpertMatrix, start: int, tensor: WeightTensor) -> None:
    form, width = place.form, tensor.shape[1]
    part = numbers_of(tensor, place.data.device)
    if form.levels == "whole":
        part = part.looked_up()
    if form.group:
        part = part.by_groups_of(form.group)
    held, kinds = form.groups(width), form.kinds
    if form.scale == "two":
        tops = part.tops
        assert tops is not None and (part.added is not None) == (kinds == 2)
        scales, offsets = part.scales, part.added
    else:
        tops, part = None, part.in_one_level()
        scales, offsets = part.scales, _offsets(part, form.offset)
    offsets = None if offsets is None else offsets[:, :held].to(place.scales.dtype)
    scales = scales[:, :held].to(place.scales.dtype)
    _check_finite([tensor], [one.float() for one in (scales, offsets, tops) if one is not None])
    place.put(start, part.numbers, scales, offsets=offsets, tops=tops)


def _put_small_floats(place: ExpertMatrix, start: int, tensor: WeightTensor) -> None:
    """Numbers of four bits with a power of two, or with a float8 and a float32 of the whole tensor."""
    tops, (numbers, scales) = None, _small_floats(tensor, place.data.device)
    if place.form.scale == "e4m3":
        assert isinstance(tensor, ScaledTensor)
        tops = torch.full((len(numbers), 1, 1), _factor(tensor.outline), device=place.data.device)
    nothing = scales == 255 if place.form.scale == "e8m0" else (scales & 127) == 127
    if bool(nothing.any()) or (tops is not None and not bool(tops.isfinite().all())):
        raise ModelError(f"{tensor.name} has a scale that is not a number")
    place.put(start, numbers, scales, tops=tops)


def _small_floats(tensor: WeightTensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8: numbers of four bits [rows, width], and scales as they are stored [rows, groups]"""
    rows, width = tensor.shape
    if isinstance(tensor, ScaledTensor):
        parts = tensor.parts()
        codes, scales = on_device(parts.codes, device), on_device(parts.scales.astype(np.uint8), device)
        return torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1)[:, :width], scales
    # GGUF's blocks: a power, then the first 16 numbers below the last 16
    blocks = on_device(tensor.data, device).view(-1, tensor.kind.block_bytes)
    return nibbles(blocks[:, 1:]).view(rows, width), blocks[:, 0].reshape(rows, -1)


def _fill_small_floats(place: SmallFloatUnits, tensors: Sequence[WeightTensor]) -> None:
    """One expert's: of float8 with a scale for each row, or of four bits with powers of two."""
    device = place.data.device
    if place.code is MX_UNITS:
        found = [_small_floats(tensor, device) for tensor in tensors]
        numbers, powers = (torch.cat(parts) for parts in zip(*found, strict=True))
        place.put(numbers, powers, tensors[0].name)
        return
    parts = [numbers_of(tensor, device) for tensor in tensors]
    scales = torch.cat([part.scales[:, 0] for part in parts])
    _check_finite(tensors, [scales])
    place.put(torch.cat([part.numbers for part in parts]), scales)


def _factor(parts: Parts) -> float:
    """What all scales of a tensor are multiplied by."""
    if parts.global_scale is None:
        return 1.0
    with np.errstate(all="ignore"):
        return float(np.float32(1.0) / parts.global_scale if parts.divides else parts.global_scale)


def _check_finite(tensors: Sequence[WeightTensor], values: Sequence[torch.Tensor | None]) -> None:
    if not all(bool(part.isfinite().all()) for part in values if part is not None):
        raise ModelError(f"{tensors[0].name} has a scale that is not finite, or that float16 does not hold")


def _joined(parts: Sequence[GroupValues]) -> GroupValues:
    def all_of(name: str) -> torch.Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    scales = all_of("scales")
    assert scales is not None
    return GroupValues(scales, all_of("offsets"), all_of("tops"))


def _values(part: Numbers, place: GroupedMatrix) -> GroupValues:
    """What groups have, as the form's code has it."""
    own = place.grouping
    if own.scale == "two":
        return _two_levels(part, place)
    part = part.in_one_level()
    offsets = _offsets(part, own.offset)
    held = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[own.scale]
    return GroupValues(part.scales.to(held), None if offsets is None else offsets.to(held))


def _two_levels(part: Numbers, place: GroupedMatrix) -> GroupValues:
    """Of kinds without minimums, a whole number of scales is taken away: so much larger is their second top."""
    assert part.tops is not None
    kinds, added, tops = place.grouping.kinds, part.added, part.tops
    if kinds == 2 and added is None:
        added, tops = part.scales, torch.cat([tops, tops * part.middle], dim=2)
    tops = tops.repeat_interleave(BLOCK_OF_256 // LOW_BIT_DEPTH, 1)[:, : place.rounds]
    return GroupValues(part.scales, added if kinds == 2 else None, tops[..., :kinds])


def _offsets(part: Numbers, offset: Offset) -> torch.Tensor | None:
    """Of one level: what is added to a product, or the number that stands for nothing."""
    if offset == "none":
        return None
    if offset == "zero":
        return torch.full_like(part.scales, part.middle) if part.zeros is None else part.zeros
    nothing: Any = part.middle if part.zeros is None else part.zeros
    return -nothing * part.scales if part.added is None else part.added
