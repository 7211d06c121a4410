"""Weights in few bits as files have them: whole numbers of four to eight bits or float8, with a scale, and perhaps an
offset, for each group of a row's inputs. Where each lies for few-row products (codes.cuh), and how they are brought to
bfloat16 for products of many rows. A weight is made in float32 and rounded once. `stored_numbers.py` reads files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.bit_fields import join_bits, part_bits
from twostroke.backends.cuda.kernels.block_rounding import rounded_in_blocks
from twostroke.backends.cuda.kernels.eight_bits import E4M3
from twostroke.backends.cuda.kernels.float8_levels import store_level
from twostroke.backends.cuda.kernels.packed_format import (
    LOW_BIT_DEPTH,
    OFFSETS,
    SCALE_TYPES,
    TABLES,
    UNIT_ROWS,
    Code,
    Grouping,
    units_of,
)
from twostroke.backends.cuda.kernels.unit_matrix import UnitMatrix
from twostroke.backends.cuda.kernels.unit_order import from_units, to_units

BF16: Final = torch.bfloat16
LOW_BYTES: Final = UNIT_ROWS * LOW_BIT_DEPTH // 2
SLICE_UNITS: Final = 1 << 11
"""Units times rounds that are laid out at a time: temporaries are small beside a large matrix."""
_TYPES: Final = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "two": torch.int8}


@dataclass(frozen=True, slots=True, eq=False)
class GroupValues:
    """What the groups of a matrix have: of scales in two levels signed bytes, else floats."""

    scales: torch.Tensor  # [rows, groups]
    offsets: torch.Tensor | None = None  # [rows, groups]
    tops: torch.Tensor | None = None  # float16 [rows, rounds, kinds]: what bytes are multiplied by


@dataclass(frozen=True, slots=True, eq=False)
class GroupedMatrix(UnitMatrix):
    order: torch.Tensor | None = None
    """int64 [width]: whose input each column takes, where groups do not follow one another."""

    @staticmethod
    def empty(
        shape: tuple[int, ...],
        code: Code,
        device: torch.device | str,
        *,
        is_gated: bool = False,
        has_order: bool = False,
    ) -> GroupedMatrix:
        rows, width = shape
        size = (units_of(rows), code.rounds(width), code.unit_bytes)
        data = torch.zeros(size, dtype=torch.uint8, device=device)
        order = torch.arange(width, device=device) if has_order else None
        return GroupedMatrix(data, code, rows, width, is_gated, order)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.order is None else self.order.nbytes)

    @property
    def grouping(self) -> Grouping:
        assert self.code.grouping is not None
        return self.code.grouping

    def slices(self, most_rows: int) -> Iterator[tuple[int, GroupedMatrix]]:
        """Views of runs of whole units, of `most_rows` at most or of one unit, with the first row of each."""
        assert not self.is_gated and self.order is None
        step = max(1, most_rows // UNIT_ROWS)
        for unit in range(0, self.units, step):
            first = unit * UNIT_ROWS
            rows = min(step * UNIT_ROWS, self.rows - first)
            yield first, GroupedMatrix(self.data[unit : unit + step], self.code, rows, self.width, False)

    def quantise(self, weight: torch.Tensor) -> None:
        """From floats [rows, width], to the numbers and scales that GGUF's blocks would have."""
        own = self.grouping
        assert own.scale == "f16" and own.table is None and not own.is_float8 and self.order is None
        bits, has_minimum = 4 + own.high_bits, own.offset == "added"
        numbers, scales, minimums = rounded_in_blocks(weight, self.code.group, bits, has_minimum=has_minimum)
        self.put(numbers, GroupValues(scales, minimums))

    def put(self, numbers: torch.Tensor, values: GroupValues) -> None:
        """numbers: uint8 [rows, width], in `order`"""
        own, rounds = self.grouping, self.rounds
        lows, highs = _orders(own.high_bits, numbers.device)
        padded = functional.pad(numbers, (0, rounds * LOW_BIT_DEPTH - self.width))
        by_unit = to_units(padded, is_gated=self.is_gated).view(self.units, UNIT_ROWS, rounds, LOW_BIT_DEPTH)
        step = max(1, SLICE_UNITS // rounds)
        for start in range(0, self.units, step):
            part = by_unit[start : start + step].transpose(1, 2).flatten(2)  # [units, rounds, row * input]
            place = self.data[start : start + step]
            place[..., :LOW_BYTES] = join_bits(part[..., lows] & 15, 4)
            if own.high_bits:
                place[..., LOW_BYTES : own.number_bytes] = join_bits(part[..., highs] >> 4, own.high_bits)
        self.data[..., own.number_bytes :] = self._scale_bytes(values)

    def draw(self) -> None:
        """At random, as large as a layer's weights are: for who measures products."""
        own, device = self.grouping, self.data.device
        most = 120 if own.is_float8 else 16 << own.high_bits
        numbers = torch.randint(0, most, (self.rows, self.width), device=device)
        if own.is_float8:
            numbers += 128 * torch.randint(0, 2, numbers.shape, device=device)
        groups, share = (self.rows, -(-self.width // self.code.group)), 0.02 / (4 * own.middle)
        scales, offsets, tops = share * (0.5 + torch.rand(groups, device=device)), None, None
        if own.scale == "two":
            scales = torch.full(groups, 16, dtype=torch.int8, device=device)
            tops = torch.full((self.rows, self.rounds, own.kinds), share / 16, dtype=torch.float16, device=device)
            tops[..., 1:] *= own.middle
        if own.offset != "none":
            is_scaled = own.offset == "added" and own.scale != "two"
            offsets = scales if own.scale == "two" else torch.full_like(scales, own.middle)
            offsets = -own.middle * scales if is_scaled else offsets
        self.put(numbers.to(torch.uint8), GroupValues(scales, offsets, tops))

    def _scale_bytes(self, values: GroupValues) -> torch.Tensor:
        """[units, rounds, bytes]"""
        own, held = self.grouping, self.code.scales
        assert (values.offsets is not None) == (own.kinds == 2) and (values.tops is not None) == (own.scale == "two")
        kinds = [values.scales, *([] if values.offsets is None else [values.offsets])]
        # unit, round, group of the round, kind, row's place
        laid = torch.stack([self._by_lane(kind.to(_TYPES[own.scale]), held) for kind in kinds], dim=3)
        if values.tops is None:
            return laid.view(torch.uint8).flatten(2)
        tops = torch.stack([self._by_lane(kind, 1)[:, :, 0] for kind in values.tops.unbind(2)], dim=2)
        pairs = laid.unflatten(2, (held // 2, 2)).permute(0, 1, 2, 4, 5, 3)  # a byte of each of two groups together
        bytes_of_tops = tops.contiguous().view(torch.uint8).flatten(2)
        return torch.cat([bytes_of_tops, pairs.reshape(*tops.shape[:2], -1).view(torch.uint8)], dim=2)

    def _by_lane(self, values: torch.Tensor, held: int) -> torch.Tensor:
        """[rows, groups] as [units, rounds, groups of a round, place]"""
        filled = functional.pad(values, (0, self.rounds * held - values.shape[1]))
        by_unit = to_units(filled, is_gated=self.is_gated).view(self.units, UNIT_ROWS, self.rounds, held)
        return by_unit[:, _places(values.device)].permute(0, 2, 3, 1).contiguous()

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, width], of weights as bfloat16 has them; inputs as they are counted outside."""
        own, held = self.grouping, self.code.scales
        lows, highs = _orders(own.high_bits, self.data.device)
        numbers = part_bits(self.data[..., :LOW_BYTES], 4)[..., torch.argsort(lows)]
        if own.high_bits:
            above = part_bits(self.data[..., LOW_BYTES : own.number_bytes], own.high_bits)
            numbers = numbers | above[..., torch.argsort(highs)] << 4
        if own.table is not None:
            numbers = torch.tensor(TABLES[own.table].entries, device=self.data.device)[numbers.long()]
        levels = numbers.contiguous().view(E4M3).float() if own.is_float8 else numbers.float()
        levels = levels.view(self.units, self.rounds, UNIT_ROWS, held, -1)
        scales, offsets = (kind.transpose(2, 3)[..., None] for kind in self._held_values())
        if own.offset == "added":
            values = levels * scales + offsets
        else:
            values = (levels - offsets) * scales
        by_row = values.permute(0, 2, 1, 3, 4).reshape(self.units * UNIT_ROWS, -1)
        found = from_units(by_row, self.rows, is_gated=self.is_gated)[:, : self.width]
        if self.order is not None:
            found = found[:, torch.argsort(self.order)]
        return found.to(BF16).to(dtype)

    def _held_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [units, rounds, groups, rows]: scales, and what is added or stands for nothing"""
        own, held, lead = self.grouping, self.code.scales, self.data.shape[:2]
        kinds, back = own.kinds, torch.argsort(_places(self.data.device))
        region = self.data[..., own.number_bytes :].contiguous()
        if own.scale == "two":
            top_bytes = kinds * UNIT_ROWS * 2
            tops = region[..., :top_bytes].contiguous().view(torch.float16).view(*lead, 1, kinds, UNIT_ROWS).float()
            pairs = region[..., top_bytes:].contiguous().view(torch.int8).view(*lead, held // 2, kinds, UNIT_ROWS, 2)
            laid = pairs.permute(0, 1, 2, 5, 3, 4).reshape(*lead, held, kinds, UNIT_ROWS).float() * tops
        else:
            laid = region.view(_TYPES[own.scale]).view(*lead, held, kinds, UNIT_ROWS).float()
        laid = laid[..., back]
        if kinds == 2:
            return laid[..., 0, :], laid[..., 1, :] * (-1 if own.scale == "two" else 1)
        return laid[..., 0, :], torch.full_like(laid[..., 0, :], 0 if own.is_float8 else own.middle)


@cache
def _orders(high_bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a round of a unit, [row * input]: whose lowest four bits lie first, second and so on; and whose bits above."""
    row = torch.arange(UNIT_ROWS, device=device)[:, None]
    k = torch.arange(LOW_BIT_DEPTH, device=device)[None, :]
    warp, lane, step = row // 16, row % 8 * 4 + k % 8 // 2, k // 16
    neighbour, place = k % 2 * 16, k % 16 // 8 * 2 + row // 8 % 2  # in a word of a thread
    fours = (warp * 1024 + step // 4 * 512 + lane * 16 + step % 4 * 4) * 8 + neighbour + place * 4
    above = {
        0: fours,
        1: (warp * 256 + lane * 8 + step // 4 * 4) * 8 + neighbour + step % 4 * 4 + place,
        2: (warp * 512 + lane * 16 + step // 2 * 4) * 8 + neighbour + step % 2 * 8 + place * 2,
        4: fours,
    }[high_bits]
    return torch.argsort(fours.flatten()), torch.argsort(above.flatten())


@cache
def _places(device: torch.device) -> torch.Tensor:
    """Whose values lie first, second and so on, of a unit's rows: two that are eight apart lie together."""
    row = torch.arange(UNIT_ROWS, device=device)
    return torch.argsort(row // 16 * 16 + row % 8 * 2 + row // 8 % 2)


def dequantise_grouped_into(weight: GroupedMatrix, out: torch.Tensor, experts: int = 1) -> None:
    """out: [rows, width], contiguous; gate, then up; inputs in the matrix's `order`. At the speed of memory. `experts`:
    matrices that lie one behind the other, of which it is the first  # out [experts, rows, width]"""
    assert out.numel() == experts * weight.rows * weight.width and out.is_contiguous()
    _launch(weight, out, None, experts)


def grouped_levels_into(weight: GroupedMatrix, numbers: torch.Tensor, scales: torch.Tensor, experts: int = 1) -> None:
    """As `four_bits.levels_into`, of codes whose numbers are whole in float8."""
    _launch(weight, numbers.view(E4M3), scales, experts)


def _launch(weight: GroupedMatrix, out: torch.Tensor, scales: torch.Tensor | None, experts: int) -> None:
    code, own = weight.code, weight.grouping
    words = (0, 0, 0, 0) if own.table is None else tuple(_signed_word(word) for word in TABLES[own.table].words)
    launcher(_dequantise_grouped, (weight.units * weight.rounds, experts))(
        weight.data, weight.data.view(torch.float16), weight.data.view(BF16), weight.data.view(torch.float32), out,
        scales, weight.rows, weight.width, weight.rounds, UNIT_BYTES=code.unit_bytes, SCALES=code.scales,
        HIGH=own.high_bits, SCALE_TYPE=SCALE_TYPES[own.scale], OFFSET=OFFSETS[own.offset], FLOAT8=own.is_float8,
        GATED=weight.is_gated, MIDDLE=own.middle, TABLE=own.table is not None, FIRST=words[0], SECOND=words[1],
        THIRD=words[2], LAST=words[3], UNIT=UNIT_ROWS, DEPTH=LOW_BIT_DEPTH, num_warps=4,
    )  # fmt: skip


def _signed_word(word: int) -> int:
    """The same bits as an int32 has them."""
    return word - (1 << 32) if word >> 31 else word


@triton.jit
def _signed(data, at):
    return tl.load(data + at).to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _values(data, halves, bfloats, floats, start, at, SCALE_TYPE: tl.constexpr):
    """At this many values behind `start`, in bytes."""
    if SCALE_TYPE == 0:
        found = tl.load(halves + start // 2 + at).to(tl.float32)
    elif SCALE_TYPE == 1:
        found = tl.load(bfloats + start // 2 + at).to(tl.float32)
    else:
        found = tl.load(floats + start // 4 + at)
    return found


@triton.jit(do_not_specialize=["rows"])
def _dequantise_grouped(
    data, halves, bfloats, floats, out, levels_scales, rows, width, rounds, UNIT_BYTES: tl.constexpr,
    SCALES: tl.constexpr, HIGH: tl.constexpr, SCALE_TYPE: tl.constexpr, OFFSET: tl.constexpr, FLOAT8: tl.constexpr,
    GATED: tl.constexpr, MIDDLE: tl.constexpr, TABLE: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    THIRD: tl.constexpr, LAST: tl.constexpr, UNIT: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One round of one unit of an expert. With `levels_scales`, float8 numbers and the scales apart."""
    program, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = (expert * tl.num_programs(0) + program) * UNIT_BYTES
    in_unit, k = tl.arange(0, UNIT)[:, None], tl.arange(0, DEPTH)[None, :]
    warp, half, lane = in_unit // 16, in_unit // 8 % 2, in_unit % 8 * 4 + k % 8 // 2
    step, place = k // 16, k % 16 // 8 * 2 + half
    four = (warp * 1024 + step // 4 * 512 + lane * 16 + step % 4 * 4) * 8 + k % 2 * 16 + place * 4
    number = (tl.load(data + start + four // 8).to(tl.int32) >> (four % 8)) & 15
    low_bytes: tl.constexpr = UNIT * DEPTH // 2
    if HIGH > 0:
        if HIGH == 4:
            bit = four
        elif HIGH == 2:
            bit = (warp * 512 + lane * 16 + step // 2 * 4) * 8 + k % 2 * 16 + step % 2 * 8 + place * 2
        else:
            bit = (warp * 256 + lane * 8 + step // 4 * 4) * 8 + k % 2 * 16 + step % 4 * 4 + place
        above = (tl.load(data + start + low_bytes + bit // 8).to(tl.int32) >> (bit % 8)) & ((1 << HIGH) - 1)
        number = number | (above << 4)
    if TABLE:
        first_half, last_half = tl.where(number < 4, FIRST, SECOND), tl.where(number < 12, THIRD, LAST)
        words = tl.where(number < 8, first_half, last_half)
        number = (words >> (number % 4 * 8)) & 255
    kinds: tl.constexpr = 2 if OFFSET > 0 else 1
    scales = start + low_bytes + UNIT * DEPTH * HIGH // 8
    row_place, group = warp * 16 + in_unit % 8 * 2 + half, k * SCALES // DEPTH
    if SCALE_TYPE == 3:
        byte = scales + kinds * UNIT * 2 + group // 2 * (kinds * UNIT * 2) + row_place * 2 + group % 2
        scale = _values(data, halves, bfloats, floats, scales, row_place, 0) * _signed(data, byte)
        offset = scale
        if OFFSET > 0:
            lower = _values(data, halves, bfloats, floats, scales, UNIT + row_place, 0)
            offset = -(lower * _signed(data, byte + UNIT * 2))
    else:
        at = group * (kinds * UNIT) + row_place
        scale = _values(data, halves, bfloats, floats, scales, at, SCALE_TYPE)
        offset = scale
        if OFFSET > 0:
            offset = _values(data, halves, bfloats, floats, scales, at + UNIT, SCALE_TYPE)
    row = program // rounds * UNIT + in_unit
    target = (row % 16 // 8) * (rows // 2) + row // 16 * 8 + row % 8 if GATED else row
    inputs = program % rounds * DEPTH + k
    if levels_scales is not None:
        if FLOAT8:
            bits = ((number & 0x80) << 24) | ((number & 0x7F) << 20)
            level = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        elif OFFSET == 2:
            level = number.to(tl.float32) - offset
        else:
            level = (number - MIDDLE).to(tl.float32)
        level = tl.where(inputs < width, level, 0.0)
        store_level(level, scale, out, levels_scales, expert, target, row < rows, inputs, rows, rounds, SCALES, DEPTH)
        return
    if FLOAT8:
        # An e4m3's exponent and mantissa, where float32 has them: 2^120 times too small, and exact.
        bits = ((number & 0x80) << 24) | ((number & 0x7F) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale
    elif OFFSET == 1:
        value = number.to(tl.float32) * scale + offset
    elif OFFSET == 2:
        value = (number.to(tl.float32) - offset) * scale
    else:
        value = (number - MIDDLE).to(tl.float32) * scale
    to = out + (expert * rows + target) * width + inputs
    tl.store(to, value.to(tl.bfloat16).to(out.dtype.element_ty), mask=(row < rows) & (inputs < width))
