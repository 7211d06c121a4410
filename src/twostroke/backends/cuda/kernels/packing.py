"""Weights of bfloat16 in twelve bits, for decode, which does little but read them. Sign and mantissa are kept, an
exponent becomes four bits below the largest of its row. Knows the format byte by byte: what a weight becomes, where it
lies, and how a device packs it in one pass over the weights, with no room beside, at the speed of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.packed_format import (
    DEPTH,
    ROUND_BYTES,
    TWELVE,
    UNIT_ROWS,
    Code,
    can_pack,
    units_of,
)

EXPONENT_CODES: Final = 15
"""Exponents of a row that are kept, from its largest down. What is smaller is rounded to the grid of the last one, as
subnormal numbers are: by at most 2**-22 of the row's largest weight, which the sums it is added to round off anyway."""
LEAST_EXPONENT: Final = 32
"""A row of still smaller numbers (2**-95) is kept as if its largest were so large."""
ROWS_AT_ONCE: Final = 4
INPUTS_AT_ONCE: Final = 1024
WARP_BYTES: Final = ROUND_BYTES // 4
NUMBER_BYTES: Final = 1024
"""Of a warp's bytes, those of codes' lower bytes; their upper halves of bytes follow."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One matrix, or one of each expert. A product with what `data` holds is multiplied by `factors`, row by row."""

    data: torch.Tensor  # uint8 [..., units, depth // DEPTH, ROUND_BYTES]
    factors: torch.Tensor  # float32 [..., units * UNIT_ROWS], powers of two
    is_gated: bool  # rows are those of a gate and of an up matrix, in turns of eight

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device | str, *, is_gated: bool = False) -> PackedMatrix:
        """To be filled by `pack_by_kernel`; `shape` is the matrix's, [..., rows, depth]."""
        *experts, rows, depth = shape
        units = units_of(rows)
        return PackedMatrix(
            torch.empty(*experts, units, depth // DEPTH, ROUND_BYTES, dtype=torch.uint8, device=device),
            torch.empty(*experts, units * UNIT_ROWS, dtype=torch.float32, device=device),
            is_gated,
        )

    @property
    def code(self) -> Code:
        return TWELVE

    @property
    def units(self) -> int:
        return self.data.shape[-3]

    @property
    def rounds(self) -> int:
        return self.data.shape[-2]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.factors.nbytes


def is_packable(weight: torch.Tensor, *, is_gated: bool) -> bool:
    """By its form. Of a matrix that can be packed, weights that are not finite cannot: their row's factor is
    infinite, and what was packed of it is of no use."""
    return weight.dtype == torch.bfloat16 and can_pack(tuple(weight.shape), is_gated=is_gated)


def pack_by_kernel(weight: torch.Tensor, place: PackedMatrix) -> None:
    """Fill `place` from `weight` [..., rows, depth]; gated: gate, then up."""
    *_, rows, depth = weight.shape
    assert is_packable(weight, is_gated=place.is_gated) and weight.is_contiguous()
    bits, factors = weight.view(torch.int16), place.factors.view(torch.int32)
    packed_rows = factors.shape[-1]
    launcher(_row_factors, (factors.numel() // ROWS_AT_ONCE,))(
        bits, factors, rows, packed_rows, depth, GATED=place.is_gated, LEAST=LEAST_EXPONENT, ROWS=ROWS_AT_ONCE,
        INPUTS=INPUTS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    launcher(_codes, (place.data.numel() // ROUND_BYTES,))(
        bits, factors, place.data, rows, packed_rows, depth, GATED=place.is_gated, CODES=EXPONENT_CODES, UNIT=UNIT_ROWS,
        DEPTH=DEPTH, WARP=WARP_BYTES, NUMBERS=NUMBER_BYTES, EXPONENTS=WARP_BYTES - NUMBER_BYTES, num_warps=4,
    )  # fmt: skip


@triton.jit
def _source_row(row, rows, GATED: tl.constexpr):
    """Of a row as packed, that of the matrix: gates and ups take turns of eight."""
    return (row % 16 // 8) * (rows // 2) + row // 16 * 8 + row % 8 if GATED else row


@triton.jit(do_not_specialize=["rows"])
def _row_factors(
    weights, factors, rows, packed_rows, depth,
    GATED: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """weights: int16, bits of bf16 [matrices, rows, depth]; factors: int32, bits of float32 [matrices, packed_rows].
    Two to the power of each row's largest exponent: bf16 and float32 have the same exponents."""
    places = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    matrix, row = places // packed_rows, places % packed_rows
    start = (matrix.to(tl.int64) * rows + _source_row(row, rows, GATED)) * depth
    largest = tl.full([ROWS], LEAST, tl.int32)
    for first in range(0, depth, INPUTS):
        inputs = first + tl.arange(0, INPUTS)
        mask = (row < rows)[:, None] & (inputs < depth)[None, :]
        bits = tl.load(weights + start[:, None] + inputs[None, :], mask=mask, other=0).to(tl.int32)
        largest = tl.maximum(largest, tl.max(bits >> 7 & 0xFF, axis=1))
    tl.store(factors + places, largest << 23)


@triton.jit(do_not_specialize=["rows"])
def _codes(
    weights, factors, data, rows, packed_rows, depth, GATED: tl.constexpr, CODES: tl.constexpr, UNIT: tl.constexpr,
    DEPTH: tl.constexpr, WARP: tl.constexpr, NUMBERS: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    """data: uint8 [matrices, units, depth // DEPTH, 4 * WARP].
    One round of one unit, byte by byte: each looks for its weights, which lie near each other."""
    round_id = tl.program_id(0)
    rounds = depth // DEPTH
    first_place = round_id // rounds * UNIT
    matrix, first_row = first_place // packed_rows, first_place % packed_rows
    weights += matrix.to(tl.int64) * rows * depth + round_id % rounds * DEPTH
    factors += first_place
    out = data + round_id.to(tl.int64) * (4 * WARP)

    # Bits of a byte's place: warp 2, 32 inputs, row 3, pair 2, 16 inputs, input's half, row's half, input.
    byte = tl.arange(0, 4 * NUMBERS)
    warp = byte // NUMBERS
    in_unit = warp * 16 + (byte >> 1 & 1) * 8 + (byte >> 6 & 7)
    inputs = (byte >> 9 & 1) * 32 + (byte >> 3 & 1) * 16 + (byte >> 2 & 1) * 8 + (byte >> 4 & 3) * 2 + (byte & 1)
    code = _code(weights, factors, first_row, in_unit, inputs, rows, depth, GATED, CODES)
    tl.store(out + warp * WARP + byte % NUMBERS, (code & 0xFF).to(tl.uint8))

    # Warp 2, row 3, pair 2, 32 inputs, 16 inputs, row's half, input; both halves of inputs share a byte, and the second
    # half's exponents lie a byte before their signs.
    byte = tl.arange(0, 4 * EXPONENTS)
    warp, turned = byte // EXPONENTS, (byte + 1) & 3
    row_of, pair = warp * 16 + (byte >> 6 & 7), (byte >> 3 & 1) * 32 + (byte >> 2 & 1) * 16 + (byte >> 4 & 3) * 2
    own_row, next_row = row_of + (byte >> 1 & 1) * 8, row_of + (turned >> 1) * 8
    first = _code(weights, factors, first_row, own_row, pair + (byte & 1), rows, depth, GATED, CODES) >> 8
    second = _code(weights, factors, first_row, own_row, pair + 8 + (byte & 1), rows, depth, GATED, CODES) >> 8
    following = _code(weights, factors, first_row, next_row, pair + 8 + (turned & 1), rows, depth, GATED, CODES) >> 8
    upper = (first & 8) << 4 | first & 7 | second & 8 | (following & 7) << 4
    tl.store(out + warp * WARP + NUMBERS + byte % EXPONENTS, upper.to(tl.uint8))


@triton.jit
def _code(weights, factors, first_row, in_unit, inputs, rows, depth, GATED: tl.constexpr, CODES: tl.constexpr):
    """Sign (bit 11), exponent code (4 bits), mantissa (7 bits). In whole numbers: what is subnormal stays so."""
    row = first_row + in_unit
    start = _source_row(row, rows, GATED).to(tl.int64) * depth
    bits = tl.load(weights + start + inputs, mask=row < rows, other=0).to(tl.int32)
    lowest = (tl.load(factors + in_unit) >> 23 & 0xFF) - CODES
    magnitude = bits & 0x7FFF
    exact = magnitude - (lowest << 7)
    exponent = magnitude >> 7
    mantissa = (magnitude & 0x7F) + tl.where(exponent > 0, 128, 0)
    # Below the window: shifted to its grid, half to even. A shift of ten leaves nothing of eight bits.
    shift = tl.minimum(tl.maximum(lowest + 1 - tl.maximum(exponent, 1), 1), 10)
    whole = mantissa >> shift
    rest, half = mantissa - (whole << shift), 1 << (shift - 1)
    rounded = whole + tl.where((rest > half) | ((rest == half) & (whole % 2 == 1)), 1, 0)
    return tl.where(exact >= 128, exact, rounded) | (bits >> 4 & 0x800)
