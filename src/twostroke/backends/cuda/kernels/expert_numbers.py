"""Experts' matrices in few bits, by rows, as files have them: whole numbers or small floats, and scales of groups of
inputs. Kernels for experts make weights of them in registers, in float32, rounded once to bfloat16. Knows how they lie
and how they are read; who multiplies, others know."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import row_forms
from twostroke.backends.cuda.kernels.bit_fields import join_bits, part_bits
from twostroke.backends.cuda.kernels.block_rounding import rounded_in_blocks
from twostroke.backends.cuda.kernels.eight_bits import E4M3, LARGEST, LEAST_SCALE
from twostroke.backends.cuda.kernels.four_bits import quantised_by_groups
from twostroke.backends.cuda.kernels.packed_format import TABLES, Code
from twostroke.backends.cuda.kernels.row_forms import RowForm

LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
IQ4_LEVELS = tuple(entry - TABLES["iq4_nl"].middle for entry in TABLES["iq4_nl"].entries)
_TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "two": torch.int8}
TOP_INPUTS = tl.constexpr(row_forms.TOP_INPUTS)
DRAWN: Final = 0.02
"""What weights that are drawn at random reach, about."""


def _word(numbers: tuple[int, ...]) -> int:
    """Four signed bytes in an int32."""
    return int.from_bytes(bytes(number & 255 for number in numbers), "little", signed=True)


IQ4_FIRST, IQ4_SECOND, IQ4_THIRD, IQ4_LAST = (tl.constexpr(_word(IQ4_LEVELS[at : at + 4])) for at in (0, 4, 8, 12))


class Parts(NamedTuple):
    """As kernels are given them."""

    data: torch.Tensor
    highs: torch.Tensor | None = None
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    tops: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMatrix:
    data: torch.Tensor  # uint8 [experts, rows, bytes]: the lowest bits of numbers
    highs: torch.Tensor | None  # uint8 [experts, rows, bytes]: those above, where there are some
    scales: torch.Tensor  # [experts, rows, groups]
    offsets: torch.Tensor | None  # the same
    tops: torch.Tensor | None  # [experts, rows, tops, kinds], where scales are in two levels
    form: RowForm

    @property
    def code(self) -> Code:
        return self.form.code

    @property
    def width(self) -> int:
        return self.data.shape[-1] * 8 // self.form.low_bits

    @staticmethod
    def empty(shape: tuple[int, ...], form: RowForm, device: torch.device) -> ExpertMatrix:
        """shape: [experts, rows, width]"""
        *outer, width = shape

        def room(inner: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros((*outer, *inner), dtype=dtype, device=device)

        held, groups = _TYPES.get(form.scale, torch.uint8), (form.groups(width),)
        top_type = torch.float16 if form.scale == "two" else torch.float32
        return ExpertMatrix(
            room((width * form.low_bits // 8,)),
            room((width * form.high_bits // 8,)) if form.high_bits else None,
            room(groups, held),
            room(groups, held) if form.kinds == 2 else None,
            room((form.tops(width), form.kinds), top_type) if form.tops(width) else None,
            form,
        )

    @property
    def parts(self) -> Parts:
        return Parts(self.data, self.highs, self.scales, self.offsets, self.tops)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts if part is not None)

    def put(self, first: int, numbers: torch.Tensor, scales: torch.Tensor, **others: torch.Tensor | None) -> None:
        """Some rows of all experts' from `first` on. numbers: uint8 [rows, width]; `others`: offsets and tops."""
        form, rows = self.form, slice(first, first + len(numbers))
        self.data.flatten(0, 1)[rows] = join_bits(numbers & (1 << form.low_bits) - 1, form.low_bits)
        if self.highs is not None:
            self.highs.flatten(0, 1)[rows] = join_bits(numbers >> form.low_bits, form.high_bits)
        self.scales.flatten(0, 1)[rows] = scales
        for place, values in ((self.offsets, others.get("offsets")), (self.tops, others.get("tops"))):
            if place is not None:
                assert values is not None
                place.flatten(0, 1)[rows] = values

    def quantise(self, weights: torch.Tensor) -> None:
        """From floats [experts, rows, width], to the nearest."""
        form, minimums = self.form, None
        for expert, weight in enumerate(weights):
            if form.levels == "e4m3":
                scales = torch.clamp(weight.abs().amax(1).float() / LARGEST, min=LEAST_SCALE)[:, None]
                numbers = (weight.float() / scales).to(E4M3).view(torch.uint8)
            elif form.scale == "f16":
                has_minimum = form.offset == "added"
                numbers, scales, minimums = rounded_in_blocks(weight, form.group, form.bits, has_minimum=has_minimum)
            else:
                numbers, scales = quantised_by_groups(weight, form.group)
            self.put(expert * len(weight), numbers, scales, offsets=minimums)

    def draw(self) -> None:
        """At random, about as large as a layer's weights are: for who measures products."""
        form, device, (experts, rows) = self.form, self.data.device, self.data.shape[:2]
        share = DRAWN / {"whole": form.middle, "e2m1": 4, "e4m3": 128, "iq4_nl": 64}[form.levels]
        groups, most = (rows, form.groups(self.width)), 120 if form.levels == "e4m3" else 1 << form.bits
        tops = torch.full((rows, form.tops(self.width), form.kinds), share, device=device)
        scales = share * (0.5 + torch.rand(groups, device=device))
        if form.scale == "two":
            tops[..., 1:] *= form.middle
            scales = torch.full(groups, 16, dtype=torch.uint8, device=device)
            tops /= 16
        elif form.scale == "e8m0":
            scales = torch.full(groups, 127 + round(log2(share)), dtype=torch.uint8, device=device)
        elif form.scale == "e4m3":
            scales = torch.full(groups, 0x38, dtype=torch.uint8, device=device)  # one
        offsets = torch.full_like(scales, form.middle) if form.offset == "zero" else -form.middle * scales
        for expert in range(experts):
            numbers = torch.randint(0, most, (rows, self.width), dtype=torch.uint8, device=device)
            own = scales if form.scale == "two" else offsets
            self.put(expert * rows, numbers, scales, offsets=own, tops=tops)

    def dequantised(self) -> torch.Tensor:
        """float32 [experts, rows, width], as bfloat16 has them"""
        form = self.form
        numbers = part_bits(self.data, form.low_bits)
        if self.highs is not None:
            numbers = numbers | part_bits(self.highs, form.high_bits) << form.low_bits
        scales, offsets = self._spread(self.scales, 0), None
        if self.offsets is not None:
            offsets = self._spread(self.offsets, 1)
        if form.levels == "e2m1":
            table = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=self.data.device)
            found = table[numbers.long()] * scales
        elif form.levels == "iq4_nl":
            found = torch.tensor(IQ4_LEVELS, dtype=torch.float32, device=self.data.device)[numbers.long()] * scales
        elif form.levels == "e4m3":
            found = numbers.view(torch.float8_e4m3fn).float() * scales
        elif form.offset == "added":
            assert offsets is not None
            found = numbers.float() * scales + (-offsets if form.scale == "two" else offsets)
        else:
            found = (numbers.float() - (form.middle if offsets is None else offsets)) * scales
        return found.to(torch.bfloat16).float()

    def _spread(self, values: torch.Tensor, kind: int) -> torch.Tensor:
        """[experts, rows, groups] as float32 [experts, rows, width]"""
        form = self.form
        if form.scale == "e8m0":
            found = torch.exp2(values.double() - 127).float()
        elif form.scale == "e4m3":
            assert self.tops is not None
            found = values.view(torch.float8_e4m3fn).float() * self.tops[..., 0, 0, None]
        else:
            found = values.float()
        each = form.group or self.width
        found = found.repeat_interleave(each, -1)[..., : self.width]
        if form.scale == "two":
            assert self.tops is not None
            found = found * self.tops[..., kind].float().repeat_interleave(row_forms.TOP_INPUTS, -1)[..., : self.width]
        return found


def parts_of(weights: torch.Tensor | ExpertMatrix) -> tuple[Parts, RowForm | None]:
    """What kernels are given, and how it lies; None: floats."""
    return (weights.parts, weights.form) if isinstance(weights, ExpertMatrix) else (Parts(weights), None)


@triton.jit
def small_floats(codes):
    """int32 numbers of four bits -> float32"""
    magnitude = codes & 7
    exponent = magnitude >> 1
    bits = tl.where(exponent > 0, ((exponent + 126) << 23) | ((magnitude & 1) << 22), (magnitude & 1) * (126 << 23))
    return (bits | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def eight_bit_floats(codes):
    """int32 bits of e4m3 -> float32: exponent and mantissa where float32 has them, 2^120 times too small, and exact."""
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def powers_of_two(codes):
    """int32 exponents, less 127 -> float32; the least is below what its exponent alone can say."""
    return tl.where(codes > 0, codes << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def _table_levels(codes):
    """int32 numbers of four bits -> float32, by llama.cpp's table"""
    words = tl.where(codes < 8, tl.where(codes < 4, IQ4_FIRST, IQ4_SECOND), tl.where(codes < 12, IQ4_THIRD, IQ4_LAST))
    shifted = words >> ((codes & 3) * 8)
    return ((shifted << 24) >> 24).to(tl.float32)


@triton.jit
def _plane(plane, row, start, num_inputs: tl.constexpr, BITS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """int32 [OUTPUTS, DEPTH]: numbers of BITS bits"""
    each: tl.constexpr = 8 // BITS
    at = start // each + tl.arange(0, DEPTH // each)[None, :]
    bytes_of_rows = plane + row[:, None] * (num_inputs // each)
    if num_inputs % DEPTH == 0:
        packed = tl.load(bytes_of_rows + at).to(tl.int32)
    else:
        packed = tl.load(bytes_of_rows + at, mask=at < num_inputs // each, other=0).to(tl.int32)
    if each == 1:
        return packed
    else:
        shifts = tl.arange(0, each)[None, None, :] * BITS
        return tl.reshape((packed[:, :, None] >> shifts) & ((1 << BITS) - 1), [OUTPUTS, DEPTH])


@triton.jit
def _of_groups(
    values, tops, row, start, KIND: tl.constexpr, num_inputs: tl.constexpr, FORM: tl.constexpr, COUNT: tl.constexpr
):
    """float32 [OUTPUTS, COUNT]: of the groups from that of input `start` on"""
    GROUP: tl.constexpr = FORM.group if FORM.group > 0 else num_inputs
    groups: tl.constexpr = (num_inputs + GROUP - 1) // GROUP
    group = start // GROUP + tl.arange(0, COUNT)[None, :]
    is_group = group < groups
    held = tl.load(values + row[:, None] * groups + group, mask=is_group, other=0)
    if FORM.scale == "e8m0":
        found = powers_of_two(held.to(tl.int32))
    elif FORM.scale == "e4m3":
        found = eight_bit_floats(held.to(tl.int32)) * tl.load(tops + row)[:, None]
    elif FORM.scale == "two":
        held_tops: tl.constexpr = (num_inputs + TOP_INPUTS - 1) // TOP_INPUTS
        top = (row[:, None] * held_tops + group * GROUP // TOP_INPUTS) * FORM.kinds + KIND
        found = tl.load(tops + top, mask=is_group, other=0.0).to(tl.float32) * held.to(tl.float32)
    else:
        found = held.to(tl.float32)
    return found


@triton.jit
def stored_block(
    data, highs, scales, offsets, tops, row, start, num_inputs: tl.constexpr, FORM: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Weights of DEPTH inputs from `start` on, bfloat16 [OUTPUTS, DEPTH]; what is beyond the last has any value. row:
    int64 [OUTPUTS], among all experts' rows."""
    number = _plane(data, row, start, num_inputs, FORM.low_bits, OUTPUTS, DEPTH)
    if highs is not None:
        number = number | (_plane(highs, row, start, num_inputs, FORM.high_bits, OUTPUTS, DEPTH) << FORM.low_bits)
    if FORM.levels == "e2m1":
        level = small_floats(number)
    elif FORM.levels == "e4m3":
        level = eight_bit_floats(number)
    elif FORM.levels == "iq4_nl":
        level = _table_levels(number)
    elif offsets is None:
        level = (number - FORM.middle).to(tl.float32)
    else:
        level = number.to(tl.float32)
    # All inputs that are read share a scale, or each run of them has its own.
    count: tl.constexpr = DEPTH // FORM.group if FORM.group > 0 and FORM.group < DEPTH else 1
    by_group = tl.reshape(level, [OUTPUTS, count, DEPTH // count])
    scale = _of_groups(scales, tops, row, start, 0, num_inputs, FORM, count)[:, :, None]
    if offsets is not None:
        offset = _of_groups(offsets, tops, row, start, 1, num_inputs, FORM, count)[:, :, None]
        if FORM.offset == "zero":
            value = (by_group - offset) * scale
        elif FORM.scale == "two":
            value = by_group * scale - offset
        else:
            value = by_group * scale + offset
    else:
        value = by_group * scale
    return tl.reshape(value, [OUTPUTS, DEPTH]).to(tl.bfloat16)


@triton.jit
def stored_sums(
    data, highs, scales, offsets, tops, row, inputs, start, num_inputs: tl.constexpr, FORM: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Products of one row of inputs with DEPTH inputs' weights from `start` on, summed by 32 of them: float32 [OUTPUTS,
    DEPTH / 32]. inputs: a pointer to the first of all."""
    depth = start + tl.arange(0, DEPTH)
    weights = stored_block(data, highs, scales, offsets, tops, row, start, num_inputs, FORM, OUTPUTS, DEPTH)
    values = tl.load(inputs + depth, mask=depth < num_inputs, other=0.0).to(tl.float32)
    products = tl.where((depth < num_inputs)[None, :], weights.to(tl.float32) * values[None, :], 0.0)
    return tl.sum(tl.reshape(products, [OUTPUTS, DEPTH // 32, 32]), 2)
