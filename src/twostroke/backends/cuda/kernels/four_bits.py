"""Weights as whole numbers of four bits with a scale, and perhaps an offset, for each group of a row's inputs: where
each number lies for few-row products (codes.cuh), how a bfloat16 matrix is brought to them, and how they are brought
back to bfloat16 for products of many rows. All who read them multiply the same bfloat16 weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch.nn import functional

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.float8_levels import store_level
from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH, UNIT_ROWS, Code, units_of
from twostroke.backends.cuda.kernels.unit_matrix import UnitMatrix
from twostroke.backends.cuda.kernels.unit_order import from_units, to_units

ZERO: Final = 8
"""The number that stands for nothing, where there are no offsets."""
NUMBER_BYTES: Final = UNIT_ROWS * LOW_BIT_DEPTH // 2
"""Of a round of a unit; scales follow."""
SCALED_UP: Final = 2.0**73
"""What scales are held at, and by what less offsets are (codes.cuh)."""
OFFSETS_DOWN: Final = 2.0**-60
CLIPS: Final = tuple(1.0 - 0.05 * step for step in range(9))
"""Shares of a group's largest weight that the largest number may stand for: the best of them is looked for."""
SLICE_VALUES: Final = 1 << 24
"""What is quantised at a time: some dozen times as many bytes are needed meanwhile."""
BF16: Final = torch.bfloat16


@dataclass(frozen=True, slots=True, eq=False)
class FourBitMatrix(UnitMatrix):
    @staticmethod
    def empty(
        shape: tuple[int, ...], code: Code, device: torch.device | str, *, is_gated: bool = False
    ) -> FourBitMatrix:
        rows, width = shape
        size = (units_of(rows), code.rounds(width), code.unit_bytes)
        return FourBitMatrix(torch.zeros(size, dtype=torch.uint8, device=device), code, rows, width, is_gated)

    def quantise(self, weight: torch.Tensor) -> None:
        """From floats [rows, width]: round to nearest, with the clip of each group that leaves the least error."""
        assert not self.code.has_offsets
        step = max(1, SLICE_VALUES // self.width)
        pieces = [quantised_by_groups(part, self.code.group) for part in weight.split(step)]
        self.put(*(torch.cat(parts) for parts in zip(*pieces, strict=True)))

    def put(self, numbers: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        """numbers: uint8 [rows, width]; scales and offsets: [rows, groups]. A weight is its number times its scale,
        plus its offset; without offsets, of its number less eight."""
        assert (offsets is not None) == self.code.has_offsets
        held, rounds = self.code.scales, self.rounds
        filled = functional.pad(
            numbers, (0, rounds * LOW_BIT_DEPTH - self.width), value=0 if offsets is not None else ZERO
        )
        by_place = to_units(filled, is_gated=self.is_gated)
        # warp, row's half, row; round, half of the round, step, input's half, pair, input
        by_place = by_place.view(self.units, 4, 2, 8, rounds, 2, 4, 2, 4, 2).permute(0, 4, 1, 5, 3, 8, 6, 9, 7, 2)
        self.data[..., :NUMBER_BYTES] = (by_place[..., 0] | by_place[..., 1] << 4).reshape(self.units, rounds, -1)
        found = [_by_lane(scales.to(BF16).float() * SCALED_UP, self.units, rounds, held, is_gated=self.is_gated)]
        if offsets is not None:
            down = offsets.to(BF16).float() * OFFSETS_DOWN
            found.append(_by_lane(down, self.units, rounds, held, is_gated=self.is_gated))
        self.data[..., NUMBER_BYTES:] = torch.stack(found, dim=3).view(torch.uint8).reshape(self.units, rounds, -1)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, width], of weights as bfloat16 has them."""
        held, rounds = self.code.scales, self.rounds
        pairs = self.data[..., :NUMBER_BYTES].view(self.units, rounds, 4, 2, 8, 4, 4, 2, 2)
        both = torch.stack([pairs & 15, pairs >> 4], dim=-1).permute(0, 2, 9, 4, 1, 3, 6, 8, 5, 7)
        numbers = both.reshape(self.units * UNIT_ROWS, rounds * held, -1).float()
        kinds = 2 if self.code.has_offsets else 1
        lanes = self.data[..., NUMBER_BYTES:].contiguous().view(BF16).view(self.units, rounds, held, kinds, 4, 8, 2)
        scales, *offsets = lanes.permute(3, 0, 4, 6, 5, 1, 2).reshape(kinds, self.units * UNIT_ROWS, -1, 1).float()
        scales = scales / SCALED_UP
        values = numbers * scales + (offsets[0] / OFFSETS_DOWN if offsets else -ZERO * scales)
        found = from_units(values.flatten(1), self.rows, is_gated=self.is_gated)
        return found[:, : self.width].to(BF16).to(dtype)


def _by_lane(values: torch.Tensor, units: int, rounds: int, held: int, *, is_gated: bool) -> torch.Tensor:
    """[rows, groups] as [units, rounds, groups of a round, warp * row * row's half], bfloat16"""
    filled = functional.pad(values, (0, rounds * held - values.shape[1]))
    by_place = to_units(filled, is_gated=is_gated).view(units, 4, 2, 8, rounds, held).permute(0, 4, 5, 1, 3, 2)
    return by_place.reshape(units, rounds, held, -1).to(BF16)


def quantised_by_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, uint8 [rows, width], of which eight stands for nothing, and scales [rows, groups]."""
    rows, width = weight.shape
    filled = functional.pad(weight.float(), (0, -width % group)).view(rows, -1, group)
    largest = filled.abs().amax(-1)
    best_error = torch.full_like(largest, torch.inf)
    best = torch.zeros_like(largest)
    for clip in CLIPS:
        scales = (largest * (clip / (ZERO - 1))).to(BF16).float()
        error = (_nearest(filled, scales) * scales[..., None] - filled).square_().sum(-1)
        is_better = error < best_error
        best_error, best = torch.where(is_better, error, best_error), torch.where(is_better, scales, best)
    numbers = (_nearest(filled, best) + ZERO).to(torch.uint8).view(rows, -1)[:, :width]
    return numbers, best


def _nearest(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    return (values * inverse[..., None]).round_().clamp_(-ZERO, ZERO - 1)


def dequantise_into(weight: FourBitMatrix, out: torch.Tensor) -> None:
    """out: [rows, width], contiguous; gate, then up. As `dequantised`, at the speed of memory."""
    assert out.shape == (weight.rows, weight.width)
    dequantise_experts_into(weight, out, 1)


def dequantise_experts_into(first: FourBitMatrix, out: torch.Tensor, experts: int) -> None:
    """Of this many matrices that lie one behind the other. out: [experts, rows, width], contiguous"""
    assert out.numel() == experts * first.rows * first.width and out.is_contiguous()
    _launch(first, out, None, experts)


def levels_into(first: FourBitMatrix, numbers: torch.Tensor, scales: torch.Tensor, experts: int = 1) -> None:
    """numbers: uint8, bits of e4m3 [experts, rows, padded width]; scales: float32 [experts, groups, rows]: a weight is
    its number times the scale."""
    assert not first.code.has_offsets
    _launch(first, numbers.view(torch.float8_e4m3fn), scales, experts)


def _launch(first: FourBitMatrix, out: torch.Tensor, scales: torch.Tensor | None, experts: int) -> None:
    code = first.code
    launcher(_dequantise, (first.units * first.rounds, experts))(
        first.data, first.data.view(BF16), out, scales, first.rows, first.width, first.rounds,
        UNIT_BYTES=code.unit_bytes, SCALES=code.scales, OFFSETS=code.has_offsets, GATED=first.is_gated,
        UNIT=UNIT_ROWS, DEPTH=LOW_BIT_DEPTH, SCALED_UP=SCALED_UP, OFFSETS_DOWN=OFFSETS_DOWN, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _dequantise(
    numbers, lanes, out, scales, rows, width, rounds, UNIT_BYTES: tl.constexpr, SCALES: tl.constexpr,
    OFFSETS: tl.constexpr, GATED: tl.constexpr, UNIT: tl.constexpr, DEPTH: tl.constexpr,
    SCALED_UP: tl.constexpr, OFFSETS_DOWN: tl.constexpr,
):  # fmt: skip
    """One round of one unit of an expert. With `scales`, float8 numbers and the scales apart."""
    program, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = (expert * tl.num_programs(0) + program) * UNIT_BYTES
    in_unit, k = tl.arange(0, UNIT)[:, None], tl.arange(0, DEPTH)[None, :]
    warp, half, lane_row = in_unit // 16, in_unit // 8 % 2, in_unit % 8
    byte = warp * 1024 + k // 64 * 512 + lane_row * 64 + k % 8 // 2 * 16 + k % 64 // 16 * 4 + k % 2 * 2 + k % 16 // 8
    number = (tl.load(numbers + start + byte).to(tl.int32) >> (half * 4)) & 15
    kinds: tl.constexpr = 2 if OFFSETS else 1
    lane = (UNIT * DEPTH // 2) // 2 + k * SCALES // DEPTH * (UNIT * kinds) + warp * 16 + lane_row * 2 + half
    scale = tl.load(lanes + start // 2 + lane).to(tl.float32) * (1.0 / SCALED_UP)
    if OFFSETS:
        offset = tl.load(lanes + start // 2 + lane + UNIT).to(tl.float32) * (1.0 / OFFSETS_DOWN)
        value = number.to(tl.float32) * scale + offset
    else:
        value = (number - 8).to(tl.float32) * scale
    row = program // rounds * UNIT + in_unit
    target = (row % 16 // 8) * (rows // 2) + row // 16 * 8 + row % 8 if GATED else row
    inputs = program % rounds * DEPTH + k
    if scales is not None:
        level = tl.where(inputs < width, number - 8, 0).to(tl.float32)
        store_level(level, scale, out, scales, expert, target, row < rows, inputs, rows, rounds, SCALES, DEPTH)
        return
    place = out + (expert * rows + target) * width + inputs
    tl.store(place, value.to(tl.bfloat16).to(out.dtype.element_ty), mask=(row < rows) & (inputs < width))
