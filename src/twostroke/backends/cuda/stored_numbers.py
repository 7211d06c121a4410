"""Tensors as files hold them to the forms that keep their numbers and scales: unpacked on the device, and put where
products look for them. No number and no scale is rounded. Which form a matrix has is `stored_codes.py`'s to say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twostroke.backends.cuda.kernels.eight_bits import EightBitMatrix
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix, GroupValues
from twostroke.backends.cuda.kernels.mx_numbers import MxMatrix
from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH
from twostroke.backends.cuda.matrix import LowBitMatrix
from twostroke.backends.cuda.stored_codes import BLOCKS, order_of
from twostroke.core.errors import ModelError
from twostroke.models.weights.stored_forms import ScaledTensor
from twostroke.models.weights.tensor import WeightKind, WeightTensor

BLOCK_OF_256 = 256


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Of one tensor: what its file has, spread out. A weight is (number - zero) * scale, or number * scale + added; in
    two levels scale is `tops[0]` times a byte, and what is taken away `tops[1]` times another."""

    numbers: torch.Tensor  # uint8 [rows, width]
    middle: int  # the number that stands for nothing, where neither `zeros` nor `added` says another
    group: int
    scales: torch.Tensor  # [rows, groups] float32; in two levels int8
    zeros: torch.Tensor | None = None  # float32 [rows, groups]
    added: torch.Tensor | None = None  # float32 [rows, groups]; in two levels int8
    tops: torch.Tensor | None = None  # float16 [rows, blocks of 256, 1 or 2]

    def by_groups_of(self, group: int) -> Numbers:
        """Of fewer inputs: each has its own copy of what it shared."""
        each = self.group // group

        def spread(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.repeat_interleave(each, 1)

        scales = self.scales.repeat_interleave(each, 1)
        return replace(self, group=group, scales=scales, zeros=spread(self.zeros), added=spread(self.added))

    def in_one_level(self) -> Numbers:
        if self.tops is None:
            return self
        tops = self.tops.float().repeat_interleave(BLOCK_OF_256 // self.group, 1)
        added = None if self.added is None else -tops[..., 1] * self.added.float()
        return replace(self, scales=tops[..., 0] * self.scales.float(), added=added, tops=None)


def fill_stored(place: LowBitMatrix, tensors: Sequence[WeightTensor]) -> None:
    """From tensors that are joined by rows, into a form that has a code for them."""
    device = place.data.device
    if isinstance(place, MxMatrix):
        _fill_mx(place, tensors)
        return
    if isinstance(place, EightBitMatrix):
        parts = [_numbers(tensor, device) for tensor in tensors]
        place.put(torch.cat([part.numbers for part in parts]), torch.cat([part.scales[:, 0] for part in parts]))
        return
    found = [_numbers(tensor, device).by_groups_of(place.code.group) for tensor in tensors]
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


def _fill_mx(place: MxMatrix, tensors: Sequence[WeightTensor]) -> None:
    """Of every expert one tensor or two, in the order of its rows."""
    data, scales = place.data.flatten(0, 1), place.scales.flatten(0, 1)
    start = 0
    for tensor in tensors:
        rows, width = tensor.shape
        if isinstance(tensor, ScaledTensor):
            parts = tensor.parts()
            codes, powers = on_device(parts.codes, data.device), on_device(parts.scales.astype(np.uint8), data.device)
        else:  # GGUF's blocks: a power, then the first 16 numbers below the last 16
            blocks = on_device(tensor.data, data.device).view(-1, tensor.kind.block_bytes)
            numbers = _nibbles(blocks[:, 1:]).view(rows, width // 2, 2)
            codes, powers = numbers[..., 0] | numbers[..., 1] << 4, blocks[:, 0].reshape(rows, -1)
        if bool((powers == 255).any()):
            raise ModelError(f"{tensor.name} has a scale that is not a number")
        data[start : start + rows] = codes
        scales[start : start + rows] = powers
        start += rows


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
    offsets = None
    if own.offset == "zero":
        offsets = torch.full_like(part.scales, part.middle) if part.zeros is None else part.zeros
    elif own.offset == "added":
        nothing: Any = part.middle if part.zeros is None else part.zeros
        offsets = -nothing * part.scales if part.added is None else part.added
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


def _numbers(tensor: WeightTensor, device: torch.device) -> Numbers:
    if isinstance(tensor, ScaledTensor):
        return _scaled(tensor, device)
    blocks = on_device(tensor.data, device).view(-1, tensor.kind.block_bytes)
    return _READERS[tensor.kind](blocks, tensor.shape[0])


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of a host's array. By its address: torch warns of arrays that cannot be written to, and a filter is not
    this thread's own."""
    held = np.ascontiguousarray(array)
    memory = (ctypes.c_char * held.nbytes).from_address(held.ctypes.data)
    kind = torch.from_numpy(np.empty(0, dtype=held.dtype)).dtype
    seen = torch.frombuffer(memory, dtype=kind).view(held.shape)
    return torch.empty(held.shape, dtype=kind, device=device).copy_(seen)


def _scaled(tensor: ScaledTensor, device: torch.device) -> Numbers:
    """Of a folder that has scales apart."""
    parts = tensor.parts()
    rows, width = parts.shape
    codes = on_device(parts.codes, device)
    if parts.kind is WeightKind.INT4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1)[:, :width]
    by_row = np.repeat(parts.scale_values(), parts.rows_per_scale, axis=0)[:rows]
    scales = on_device(by_row.astype(np.float32), device)
    zeros = None if parts.zeros is None else on_device(parts.zeros, device).float()
    middle = {WeightKind.INT4: 8, WeightKind.INT8: 128}.get(parts.kind, 0)
    group = parts.group_size
    if scales.shape[1] == 1 and group >= width:  # one for all inputs: of any whole number of groups
        group = -(-width // LOW_BIT_DEPTH) * LOW_BIT_DEPTH
    return Numbers(codes, middle, group, scales, zeros=zeros)


# GGUF's blocks [n, bytes of a block], of some rows.


def _halves(blocks: torch.Tensor, start: int, count: int, rows: int) -> torch.Tensor:
    """float16 [rows, blocks of a row, count]"""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).view(rows, -1, count)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, bytes] to [n, 2 * bytes]: all low ones, then all high ones"""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _of_32(
    numbers: torch.Tensor, scales: torch.Tensor, rows: int, kind: WeightKind, added: torch.Tensor | None = None
) -> Numbers:
    middle, by_row = BLOCKS[kind][1].middle, numbers.reshape(rows, -1)
    return Numbers(by_row, middle, 32, scales.float(), added=None if added is None else added.float())


def _q8_0(blocks: torch.Tensor, rows: int) -> Numbers:
    return _of_32(blocks[:, 2:] ^ 128, _halves(blocks, 0, 1, rows)[..., 0], rows, WeightKind.Q8_0)


def _q4_0(blocks: torch.Tensor, rows: int) -> Numbers:
    return _of_32(_nibbles(blocks[:, 2:]), _halves(blocks, 0, 1, rows)[..., 0], rows, WeightKind.Q4_0)


def _q4_1(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, added = _halves(blocks, 0, 2, rows).unbind(2)
    return _of_32(_nibbles(blocks[:, 4:]), scales, rows, WeightKind.Q4_1, added)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[n, 4] to [n, 32], the lowest first: 0 or 16"""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor, rows: int) -> Numbers:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _of_32(numbers, _halves(blocks, 0, 1, rows)[..., 0], rows, WeightKind.Q5_0)


def _q5_1(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, added = _halves(blocks, 0, 2, rows).unbind(2)
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _of_32(numbers, scales, rows, WeightKind.Q5_1, added)


def _bytes_of_k(packed: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes a block to eight scales and eight minimums of six bits: the first four of each have a byte, in whose
    upper two bits lie those of the last four, of which a byte each has the lower bits of both."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], dim=1)
    minimums = torch.cat([second & 63, last >> 4 | (second >> 6) << 4], dim=1)
    return scales.view(torch.int8).view(rows, -1), minimums.view(torch.int8).view(rows, -1)


def _nibbles_of_k(packed: torch.Tensor) -> torch.Tensor:
    """[n, 128] to [n, 256]: 32 bytes hold 32 numbers below and the next 32 above."""
    runs = packed.reshape(len(packed), 4, 1, 32)
    return torch.cat([runs & 15, runs >> 4], dim=2).flatten(1)


def _q4_k(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, minimums = _bytes_of_k(blocks[:, 4:16], rows)
    numbers = _nibbles_of_k(blocks[:, 16:]).view(rows, -1)
    return Numbers(numbers, 8, 32, scales, added=minimums, tops=_halves(blocks, 0, 2, rows))


def _q5_k(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, minimums = _bytes_of_k(blocks[:, 4:16], rows)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).flatten(1) << 4
    numbers = (_nibbles_of_k(blocks[:, 48:]) | fifth).view(rows, -1)
    return Numbers(numbers, 16, 32, scales, added=minimums, tops=_halves(blocks, 0, 2, rows))


def _q6_k(blocks: torch.Tensor, rows: int) -> Numbers:
    """Of each half of a block 64 bytes hold the lower four bits of 64 numbers and, above, of 64 more; 32 bytes the
    other two bits of four times 32."""
    lows = blocks[:, :128].reshape(-1, 2, 1, 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    highs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    numbers = torch.cat([lows & 15, lows >> 4], dim=2).flatten(2) | highs.flatten(2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).view(rows, -1)
    return Numbers(numbers.reshape(rows, -1), 32, 16, scales, tops=_halves(blocks, 208, 1, rows))


_READERS: dict[WeightKind, Callable[[torch.Tensor, int], Numbers]] = {
    WeightKind.Q8_0: _q8_0,
    WeightKind.Q4_0: _q4_0,
    WeightKind.Q4_1: _q4_1,
    WeightKind.Q5_0: _q5_0,
    WeightKind.Q5_1: _q5_1,
    WeightKind.Q4_K: _q4_k,
    WeightKind.Q5_K: _q5_k,
    WeightKind.Q6_K: _q6_k,
}
