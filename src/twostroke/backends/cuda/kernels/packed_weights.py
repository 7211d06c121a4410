"""Weights of bfloat16 in twelve bits, for decode, which does little but read them. Sign and mantissa are kept, an
exponent becomes four bits below the largest of its row. Knows the format: what a weight becomes, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from twostroke.backends.cuda.kernels.packed_format import DEPTH, ROUND_BYTES, UNIT_ROWS, can_pack, units_of

EXPONENT_CODES: Final = 15
"""Exponents of a row that are kept, from its largest down. What is smaller is rounded to the grid of the last one, as
subnormal numbers are: by at most 2**-22 of the row's largest weight, which the sums it is added to round off anyway."""
LEAST_EXPONENT: Final = 32
"""A row of still smaller numbers (2**-95) is kept as if its largest were so large."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One matrix, or one of each expert. A product with what `data` holds is multiplied by `factors`, row by row."""

    data: torch.Tensor  # uint8 [..., units, depth // DEPTH, ROUND_BYTES]
    factors: torch.Tensor  # float32 [..., units * UNIT_ROWS], powers of two
    is_gated: bool
    """Rows are those of a gate and of an up matrix, in turns of eight."""

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device | str, *, is_gated: bool = False) -> PackedMatrix:
        """To be filled by `packing.py`; `shape` is the matrix's, [..., rows, depth]."""
        *experts, rows, depth = shape
        units = units_of(rows)
        return PackedMatrix(
            torch.empty(*experts, units, depth // DEPTH, ROUND_BYTES, dtype=torch.uint8, device=device),
            torch.empty(*experts, units * UNIT_ROWS, dtype=torch.float32, device=device),
            is_gated,
        )

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.factors.nbytes


def is_packable(weight: torch.Tensor, *, is_gated: bool) -> bool:
    """By its form. Of a matrix that can be packed, weights that are not finite cannot: their row's factor is
    infinite, and what was packed of it is of no use."""
    return weight.dtype == torch.bfloat16 and can_pack(tuple(weight.shape), is_gated=is_gated)
