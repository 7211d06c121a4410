"""Weights in twelve bits by their sizes alone: what a matrix must be like to be packed, and what it takes then. Knows
no torch: whoever plans for a card asks here too."""

from __future__ import annotations

from typing import Final

UNIT_ROWS: Final = 64
"""Rows lie in units, as many as a warp group multiplies at a time."""
DEPTH: Final = 64
"""Inputs of a unit that lie together: what a round of a product takes."""
ROUND_BYTES: Final = UNIT_ROWS * DEPTH * 3 // 2


def units_of(rows: int) -> int:
    return -(-rows // UNIT_ROWS)


def packed_bytes(rows: int, depth: int) -> int:
    return units_of(rows) * (depth // DEPTH * ROUND_BYTES + UNIT_ROWS * 4)


def can_pack(shape: tuple[int, ...], *, is_gated: bool = False) -> bool:
    """Whether a matrix of bfloat16 has a form for it. Products take two rounds of inputs at a time."""
    rows, depth = shape[-2:]
    return depth % (2 * DEPTH) == 0 and rows % (16 if is_gated else 8) == 0
