"""Weights of few bits by their sizes alone: how each code lies, what a matrix must be like to be held in it, and what
it takes then. Knows no torch: whoever plans for a card asks here too."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

UNIT_ROWS: Final = 64
"""Rows lie in units, as many as a warp group multiplies at a time."""
DEPTH: Final = 64
"""Inputs of a unit that lie together, in twelve bits: what a round of a product takes."""
ROUND_BYTES: Final = UNIT_ROWS * DEPTH * 3 // 2


LOW_BIT_DEPTH: Final = 128
"""As DEPTH, of codes of eight bits and fewer."""


@dataclass(frozen=True, slots=True)
class Code:
    """How weights are held that a product brings to bfloat16 in registers."""

    name: str
    """That of the form, and of the kernel that reads it."""
    number: int
    """CODE of the kernels."""
    depth: int
    unit_bytes: int
    """Of a round of a unit."""
    scales: int = 0
    """Of a row in a round; 0: a row has one factor, or none."""
    has_offsets: bool = False

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.depth // self.scales

    @property
    def has_factors(self) -> bool:
        return self.scales == 0

    def constants(self) -> dict[str, int]:
        return {"CODE": self.number, "SCALES": self.scales, "OFFSETS": int(self.has_offsets)}

    def rounds(self, width: int) -> int:
        """The last one may be partly of inputs that are not there."""
        return -(-width // self.depth)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Of a matrix, [..., rows, width]; one held by rows has no more of them than it has."""
        *experts, rows, width = shape
        held = rows if self.number == FP8.number else units_of(rows) * UNIT_ROWS
        own = self.rounds(width) * self.unit_bytes * held // UNIT_ROWS
        factors = (units_of(rows) * UNIT_ROWS + (rows if self.number == FP8.number else 0)) * 4
        return prod(experts) * (own + (factors if self.has_factors else 0))


def _four_bits(group: int, has_offsets: bool) -> Code:
    scales = LOW_BIT_DEPTH // group
    unit_bytes = UNIT_ROWS * (LOW_BIT_DEPTH // 2 + scales * (4 if has_offsets else 2))
    return Code(f"int4_{group}{'z' * has_offsets}", 4, LOW_BIT_DEPTH, unit_bytes, scales, has_offsets)


TWELVE: Final = Code("packed", 12, DEPTH, ROUND_BYTES)
FP8: Final = Code("fp8", 8, LOW_BIT_DEPTH, UNIT_ROWS * LOW_BIT_DEPTH)
FOUR_BITS: Final = tuple(_four_bits(group, has) for group in (128, 64, 32) for has in (False, True))
INT4: Final = FOUR_BITS[0]
"""What a bfloat16 matrix becomes when it is brought to four bits as it is loaded."""
LOW_BIT_CODES: Final = (FP8, *FOUR_BITS)


def units_of(rows: int) -> int:
    return -(-rows // UNIT_ROWS)


def packed_bytes(rows: int, depth: int) -> int:
    return units_of(rows) * (depth // DEPTH * ROUND_BYTES + UNIT_ROWS * 4)


def can_pack(shape: tuple[int, ...], *, is_gated: bool = False) -> bool:
    """Whether a matrix of bfloat16 has a form for it. Products take two rounds of inputs at a time."""
    rows, depth = shape[-2:]
    return depth % (2 * DEPTH) == 0 and rows % (16 if is_gated else 8) == 0
