"""How the products of some dozens of rows are cut, by their shape: rules, so that nothing is tuned while a user waits.
They give the best, or nearly, of what `bench/cuda/hopper_products.py` measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

MAX_ROWS: Final = 128
"""Of a block; there are several for TALL_ROWS alone."""
DEPTH: Final = 64
"""Inputs a round: 128 bytes of each row, the widest that the copy engine spreads over shared memory's banks."""
MAX_SPLITS: Final = 8
MAX_STAGES: Final = 8
SHARED_BYTES: Final = 225 * 1024
"""What a program on a Hopper chip may have, less room for barriers."""
FEW_ROWS: Final = 32
"""Up to so many rows a program of a wide product takes more outputs."""
WIDE: Final = 512
"""Blocks of outputs from which on a product, a model's head, fills the chip several times over."""
TALL_ROWS: Final = range(129, 192 + 1)
TALL_BLOCKS, TALL_OUTPUTS = 3, 128
"""They come in so many blocks, and a program has so many outputs of one."""
TALL_WEIGHTS: Final = range(1 << 23, 1 << 24)
"""Matrices of so many weights take TALL_ROWS, where all programs fit on the chip at once. Measured of 5120 x 2048:
cuBLAS is faster by itself there, but begins when the kernel ahead has ended."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How a product is cut: a program computes `outputs` outputs (with a gate: of each half) of a block of rows."""

    outputs: int
    stages: int
    num_warps: int = 4
    splits: int = 1
    """Parts of the depth, whose sums the product's reader adds up."""
    row_blocks: int = 1

    def rows_of_block(self, rows: int) -> int:
        """Of so many in all, those that a program has; of several blocks, each is of whole groups of 64."""
        return rows if self.row_blocks == 1 else padded_rows(-(-rows // self.row_blocks))

    def shared_bytes(self, rows: int, *, gated: bool) -> int:
        return self.stages * DEPTH * 2 * (padded_rows(self.rows_of_block(rows)) + self.outputs * (2 if gated else 1))


def padded_rows(rows: int) -> int:
    """A warp group multiplies 64 rows at a time."""
    return -(-rows // 64) * 64


def copied_rows(rows: int) -> int:
    """What of them comes to a program in one copy: a power of two. Three copies of 32 are slower than one of 128."""
    return next(box for box in (16, 32, 64, 128) if rows <= box)


def rows_to_read(x: torch.Tensor, wanted: int) -> int:
    """The rows that may be copied: those behind the last as well, where the buffer has them. The copy engine fills in
    for rows that are not there, and is slower at that than at reading."""
    behind = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return wanted if (wanted - 1) * x.stride(0) + x.shape[1] <= behind else len(x)


@cache
def choose_tile(
    rows: int, outputs: int, width: int, num_sms: int, *, gated: bool = False, may_split: bool = False
) -> ProductTile | None:
    """None: this product is another's to compute."""
    rounds = width // DEPTH
    if rows in TALL_ROWS and not (gated or may_split) and _is_cut_in_blocks(outputs, width, num_sms):
        return _with_stages(TALL_OUTPUTS, 1, rows, rounds, row_blocks=TALL_BLOCKS)
    if not 1 <= rows <= MAX_ROWS or width % DEPTH:
        return None
    if gated:
        # More rows are read again by every program: fewer, larger ones, where there are enough.
        is_large = rows > 64 and outputs // 128 >= 0.75 * num_sms
        block, num_warps = (128, 8) if is_large else (64, 4)
        return _with_stages(block, 1, rows, rounds, gated=True, num_warps=num_warps)
    if outputs // 128 >= WIDE:
        return _with_stages(256 if rows <= FEW_ROWS else 128, 1, rows, rounds) if rows <= 64 else None
    if outputs // 64 >= 0.65 * num_sms or not may_split:
        return _with_stages(64, 1, rows, rounds)
    block, splits = 128 if rows <= 64 else 64, 1
    while 2 * splits <= MAX_SPLITS and rounds % (2 * splits) == 0 and -(-outputs // block) * splits < 0.9 * num_sms:
        splits *= 2
    return _with_stages(block, splits, rows, rounds // splits)


def _is_cut_in_blocks(outputs: int, width: int, num_sms: int) -> bool:
    programs = -(-outputs // TALL_OUTPUTS) * TALL_BLOCKS
    return width % DEPTH == 0 and outputs * width in TALL_WEIGHTS and programs <= num_sms


def _with_stages(
    outputs: int, splits: int, rows: int, rounds: int, *, gated: bool = False, num_warps: int = 4, row_blocks: int = 1
) -> ProductTile:
    one = ProductTile(outputs, 1, row_blocks=row_blocks).shared_bytes(rows, gated=gated)
    return ProductTile(outputs, min(SHARED_BYTES // one, MAX_STAGES, rounds), num_warps, splits, row_blocks)
