"""Experts' matrices in few bits as Hopper's few-row product takes them: each expert's in units of 64 rows, like a dense
matrix of the same code. Two codes are of experts alone: MXFP4, and float8 with a factor for each row. Knows where their
numbers lie (codes.cuh), and how all are brought to bfloat16 for products of many rows."""

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
from twostroke.backends.cuda.kernels.eight_bits import E4M3, LARGEST, LEAST_SCALE
from twostroke.backends.cuda.kernels.expert_numbers import DRAWN, LEVELS, eight_bit_floats, powers_of_two, small_floats
from twostroke.backends.cuda.kernels.float8_levels import store_level
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix, dequantise_experts_into, levels_into
from twostroke.backends.cuda.kernels.grouped_numbers import (
    GroupedMatrix,
    dequantise_grouped_into,
    grouped_levels_into,
)
from twostroke.backends.cuda.kernels.packed_format import (
    FP8_UNITS,
    LOW_BIT_DEPTH,
    MX_GROUP,
    MX_UNITS,
    UNIT_ROWS,
    Code,
    units_of,
)
from twostroke.backends.cuda.kernels.unit_order import from_units, to_units
from twostroke.core.errors import ModelError

POWERS_UP: Final = 66
"""What is added to the exponents of powers of two (codes.cuh)."""
MOST_POWER: Final = 254 - POWERS_UP
SLICE_ROUNDS: Final = 1 << 8
"""Rounds of units whose numbers are laid out at a time."""
MX_NUMBER_BYTES: Final = UNIT_ROWS * LOW_BIT_DEPTH // 2
"""Of a round of a unit; the powers follow."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertUnits:
    """Of all experts of a layer."""

    data: torch.Tensor  # uint8 [experts, units, rounds, code.unit_bytes]
    factors: torch.Tensor | None  # float32 [experts, units * UNIT_ROWS], of float8
    code: Code
    rows: int  # of an expert
    width: int
    is_gated: bool  # rows are those of a gate and of an up matrix, in turns of eight

    @staticmethod
    def empty(shape: tuple[int, ...], code: Code, device: torch.device | str, *, is_gated: bool = False) -> ExpertUnits:
        experts, rows, width = shape
        units = units_of(rows)
        data = torch.zeros(experts, units, code.rounds(width), code.unit_bytes, dtype=torch.uint8, device=device)
        factors = torch.zeros(experts, units * UNIT_ROWS, device=device) if code.has_factors else None
        return ExpertUnits(data, factors, code, rows, width, is_gated)

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + (0 if self.factors is None else self.factors.nbytes)

    def __iter__(self) -> Iterator[SmallFloatUnits | FourBitMatrix | GroupedMatrix]:
        """A matrix each, which is filled as others are."""
        for expert, data in enumerate(self.data):
            if self.code in (FP8_UNITS, MX_UNITS):
                factors = None if self.factors is None else self.factors[expert]
                yield SmallFloatUnits(data, factors, self.code, self.rows, self.width, self.is_gated)
            elif self.code.grouping is not None:
                yield GroupedMatrix(data, self.code, self.rows, self.width, self.is_gated)
            else:
                yield FourBitMatrix(data, self.code, self.rows, self.width, self.is_gated)

    def quantise(self, weights: torch.Tensor) -> None:
        """From floats [experts, rows, width]"""
        for matrix, weight in zip(self, weights, strict=True):
            matrix.quantise(weight)

    def draw(self) -> None:
        """At random, about as large as a layer's weights are: for who measures products."""
        for matrix in self:
            if isinstance(matrix, FourBitMatrix):
                matrix.quantise(torch.randn(self.rows, self.width, device=self.data.device) * DRAWN)
            else:
                matrix.draw()

    def dequantised(self) -> torch.Tensor:
        """float32 [experts, rows, width], of weights as they are multiplied"""
        return torch.stack([matrix.dequantised() for matrix in self])


@dataclass(frozen=True, slots=True, eq=False)
class SmallFloatUnits:
    """One expert's, of MXFP4 or of float8."""

    data: torch.Tensor  # uint8 [units, rounds, code.unit_bytes]
    factors: torch.Tensor | None  # float32 [units * UNIT_ROWS], of float8
    code: Code
    rows: int
    width: int
    is_gated: bool

    def quantise(self, weight: torch.Tensor) -> None:
        """From floats [rows, width] to float8, to the nearest."""
        assert self.code is FP8_UNITS
        scales = torch.clamp(weight.abs().amax(1).float() / LARGEST, min=LEAST_SCALE)
        self.put((weight.float() / scales[:, None]).to(E4M3).view(torch.uint8), scales)

    def draw(self) -> None:
        """At random, about as large as a layer's weights are."""
        device, is_float8 = self.data.device, self.code is FP8_UNITS
        numbers = torch.randint(0, 120 if is_float8 else 16, (self.rows, self.width), dtype=torch.uint8, device=device)
        if is_float8:
            numbers |= torch.randint(0, 2, numbers.shape, dtype=torch.uint8, device=device) << 7
            self.put(numbers, DRAWN / 128 * (0.5 + torch.rand(self.rows, device=device)))
            return
        groups = -(-self.width // MX_GROUP)
        self.put(numbers, torch.randint(118, 121, (self.rows, groups), dtype=torch.uint8, device=device))

    def put(self, numbers: torch.Tensor, scales: torch.Tensor, name: str = "a matrix") -> None:
        """numbers: uint8 [rows, width], bits of e4m3 or of e2m1; scales: float32 [rows], or uint8 [rows, groups], the
        exponents of powers of two with 127 added. `name`: of whose scales an error speaks."""
        units, rounds = self.data.shape[:2]
        padded = functional.pad(numbers, (0, rounds * LOW_BIT_DEPTH - self.width))
        by_unit = to_units(padded, is_gated=self.is_gated).view(units, UNIT_ROWS, rounds, LOW_BIT_DEPTH)
        laid = by_unit.transpose(1, 2).flatten(2)  # [units, rounds, row * input]
        if self.code is FP8_UNITS:
            assert self.factors is not None
            self.data.copy_(laid[..., _float8_order(self.data.device)])
            self.factors.copy_(to_units(scales[:, None], is_gated=self.is_gated)[:, 0])
            return
        if int(scales.max()) > MOST_POWER:
            raise ModelError(f"{name} has a scale that is not a number, or is larger than 2^{MOST_POWER - 127}")
        step = max(1, SLICE_ROUNDS // rounds)
        for start in range(0, units, step):
            self.data[start : start + step, :, :MX_NUMBER_BYTES] = _mx_bytes(laid[start : start + step])
        held = LOW_BIT_DEPTH // MX_GROUP
        powers = functional.pad(scales.int(), (0, rounds * held - scales.shape[1])) + POWERS_UP
        of_rows = to_units(powers, is_gated=self.is_gated).view(units, 4, 2, 8, rounds, held)
        self.data[..., MX_NUMBER_BYTES:] = of_rows.permute(0, 4, 1, 3, 2, 5).reshape(units, rounds, -1).to(torch.uint8)

    def dequantised(self) -> torch.Tensor:
        """float32 [rows, width]"""
        units, rounds = self.data.shape[:2]
        if self.code is FP8_UNITS:
            assert self.factors is not None
            laid = self.data[..., torch.argsort(_float8_order(self.data.device))].contiguous()
            found = laid.view(E4M3).float().view(units, rounds, UNIT_ROWS, LOW_BIT_DEPTH).transpose(1, 2)
            by_row = found.reshape(units * UNIT_ROWS, -1) * self.factors[:, None]
        else:
            numbers, powers = self.data[..., :MX_NUMBER_BYTES], self.data[..., MX_NUMBER_BYTES:]
            bits = (numbers[..., None] >> torch.arange(8, device=numbers.device, dtype=torch.uint8) & 1).flatten(2)
            fields = bits[..., torch.argsort(_mx_order(self.data.device))].unflatten(-1, (-1, 4)).long()
            codes = (fields << torch.arange(4, device=numbers.device)).sum(-1)
            table = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=numbers.device)
            levels = table[codes].view(units, rounds, UNIT_ROWS, LOW_BIT_DEPTH).transpose(1, 2)
            held = LOW_BIT_DEPTH // MX_GROUP
            of_rows = powers.reshape(units, rounds, 4, 8, 2, held).permute(0, 2, 4, 3, 1, 5)
            scales = torch.exp2(of_rows.reshape(units * UNIT_ROWS, -1).double() - POWERS_UP - 127).float()
            by_row = levels.reshape(units * UNIT_ROWS, -1) * scales.repeat_interleave(MX_GROUP, 1)
        return from_units(by_row, self.rows, is_gated=self.is_gated)[:, : self.width]


def _mx_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """uint8 [units, rounds, row * input], of four bits each, to the bytes of whole rounds. Takes some forty bytes a
    number meanwhile."""
    bits = (numbers[..., None] >> torch.arange(4, device=numbers.device, dtype=torch.uint8) & 1).flatten(2)
    words = bits[..., _mx_order(numbers.device)].unflatten(-1, (-1, 8)).int()
    return (words << torch.arange(8, device=numbers.device, dtype=torch.int32)).sum(-1).to(torch.uint8)


def _lanes(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Of each number of a round of a unit, [row * input]: the warp and lane whose it is, the step, the half of rows,
    the half of inputs and which of two neighbours."""
    row = torch.arange(UNIT_ROWS, device=device)[:, None].expand(-1, LOW_BIT_DEPTH).flatten()
    k = torch.arange(LOW_BIT_DEPTH, device=device)[None, :].expand(UNIT_ROWS, -1).flatten()
    return row // 16, row % 8 * 4 + k % 8 // 2, k // 16, row // 8 % 2, k % 16 // 8, k % 2


@cache
def _float8_order(device: torch.device) -> torch.Tensor:
    """Whose byte lies first, second and so on."""
    warp, lane, step, half, second, neighbour = _lanes(device)
    byte = warp * 2048 + step // 2 * 512 + lane * 16 + step % 2 * 8 + half * 4 + neighbour * 2 + (1 - second)
    return torch.argsort(byte)


@cache
def _mx_order(device: torch.device) -> torch.Tensor:
    """Whose bit lies first, second and so on, of [row * input * bit]. By which of a thread's four pairs in a word,
    where the three bits of a number's size are, and its sign; of one pair the signs are in each other's half."""
    places = torch.tensor([[0, 1, 2, 9], [10, 11, 12, 19], [4, 5, 6, 13], [14, 7, 8, 15]], device=device)
    warp, lane, step, half, second, neighbour = _lanes(device)
    word = warp * 1024 + step // 4 * 512 + lane * 16 + step % 4 * 4
    place = places[second * 2 + half] + neighbour[:, None] * 16
    return torch.argsort((word[:, None] * 8 + place % 32).flatten())


def dequantise_units_into(weights: ExpertUnits, out: torch.Tensor) -> None:
    """out: bfloat16 [experts, rows, width], contiguous; gate, then up. At the speed of memory."""
    assert out.shape == (len(weights.data), weights.rows, weights.width) and out.is_contiguous()
    first, *_ = weights
    if isinstance(first, GroupedMatrix):
        dequantise_grouped_into(first, out, experts=len(weights.data))
        return
    if isinstance(first, FourBitMatrix):
        dequantise_experts_into(first, out, len(weights.data))
        return
    _launch(weights, out, None)


def unit_levels_into(weights: ExpertUnits, numbers: torch.Tensor, scales: torch.Tensor) -> None:
    """As `four_bits.levels_into`, of codes whose numbers are whole in float8; of float8 with factors `scales` are those
    [experts, 1, rows]."""
    first, *_ = weights
    if isinstance(first, GroupedMatrix):
        grouped_levels_into(first, numbers, scales, len(weights.data))
    elif isinstance(first, FourBitMatrix):
        levels_into(first, numbers, scales, len(weights.data))
    else:
        _launch(weights, numbers.view(E4M3), scales)


def _launch(weights: ExpertUnits, out: torch.Tensor, scales: torch.Tensor | None) -> None:
    code, (experts, units, rounds) = weights.code, weights.data.shape[:3]
    launcher(_dequantise_units, (units * rounds, experts))(
        weights.data, weights.data.view(torch.int32), weights.factors, out, scales, weights.rows, weights.width, rounds,
        units, UNIT_BYTES=code.unit_bytes,
        GATED=weights.is_gated, UNIT=UNIT_ROWS, DEPTH=LOW_BIT_DEPTH, GROUP=MX_GROUP, POWERS_UP=POWERS_UP, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "units"])
def _dequantise_units(
    data, words, factors, out, scales, rows, width, rounds, units, UNIT_BYTES: tl.constexpr, GATED: tl.constexpr,
    UNIT: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, POWERS_UP: tl.constexpr,
):  # fmt: skip
    """One round of one unit of an expert; with factors float8, else MXFP4. With `scales`, float8 numbers and the scales
    apart."""
    program, expert = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = (expert * units * rounds + program) * UNIT_BYTES
    in_unit, k = tl.arange(0, UNIT)[:, None], tl.arange(0, DEPTH)[None, :]
    warp, half, lane = in_unit // 16, in_unit // 8 % 2, in_unit % 8 * 4 + k % 8 // 2
    step, second, neighbour = k // 16, k % 16 // 8, k % 2
    row = program // rounds * UNIT + in_unit
    if factors is not None:
        byte = warp * 2048 + step // 2 * 512 + lane * 16 + step % 2 * 8 + half * 4 + neighbour * 2 + (1 - second)
        found = eight_bit_floats(tl.load(data + start + byte).to(tl.int32))
        scale = tl.load(factors + expert * units * UNIT + row)
    else:
        word = warp * 1024 + step // 4 * 512 + lane * 16 + step % 4 * 4
        pair = second * 2 + half
        # Where the lowest bit of a number's size is, then the other two, then the sign (`_mx_order`).
        lowest = tl.where(pair == 0, 0, tl.where(pair == 1, 10, tl.where(pair == 2, 4, 14))) + neighbour * 16
        middle = tl.where(pair == 0, 1, tl.where(pair == 1, 11, tl.where(pair == 2, 5, 7))) + neighbour * 16
        sign = (tl.where(pair == 0, 9, tl.where(pair == 1, 19, tl.where(pair == 2, 13, 15))) + neighbour * 16) % 32
        both = tl.load(words + start // 4 + word // 4)
        code = (both >> lowest & 1) | (both >> middle & 3) << 1 | (both >> sign & 1) << 3
        power = (warp * 8 + in_unit % 8) * 2 + half
        held = tl.load(data + start + UNIT * DEPTH // 2 + power * (DEPTH // GROUP) + k // GROUP).to(tl.int32)
        found, scale = small_floats(code), powers_of_two(held - POWERS_UP)
    target = (row % 16 // 8) * (rows // 2) + row // 16 * 8 + row % 8 if GATED else row
    inputs = program % rounds * DEPTH + k
    if scales is not None:
        level = tl.where(inputs < width, found, 0.0)
        if factors is not None:
            store_level(level, scale, out, scales, expert, target, row < rows, inputs, rows, rounds, 0, DEPTH)
        else:
            store_level(
                level, scale, out, scales, expert, target, row < rows, inputs, rows, rounds, DEPTH // GROUP, DEPTH
            )
        return
    value = found * scale
    to = out + (expert * rows + target) * width + inputs
    tl.store(to, value.to(tl.bfloat16).to(out.dtype.element_ty), mask=(row < rows) & (inputs < width))
