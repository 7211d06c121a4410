"""How products of some dozens of rows are cut for Hopper in Gluon: what a tile takes of the chip, and which are worth
measuring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twostroke.backends.cuda.kernels.product import (
    DEPTH,
    MAX_PART_ROWS,
    Card,
    Product,
    Settings,
    busy_share,
    declines,
)

MAX_ROWS: Final = 128
"""Of a block."""
MAX_STAGES: Final = 8
SHARED_BYTES: Final = 225 * 1024
"""What a program on a Hopper chip may have, less room for barriers."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """How a product is cut: a program computes `outputs` outputs (with a gate: of each half) of a block of rows."""

    outputs: int
    stages: int
    num_warps: int = 4
    splits: int = 1
    """Parts of the depth, whose sums the product's reader adds up."""
    row_blocks: int = 1

    @property
    def sums(self) -> int:
        return self.splits if self.splits > 1 else 0

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


class GluonProducts:
    name, form, fuses = "gluon", "plain", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> ProductTile | str:
        reason = declines(product, card)
        one = ProductTile(stages=1, **settings)
        rounds, odd = divmod(product.width, DEPTH * one.splits)
        if reason is not None:
            return reason
        if one.rows_of_block(rows) > MAX_ROWS or odd or (one.splits > 1 and not product.adds_parts):
            return f"it takes {MAX_ROWS} rows of a block, and parts that are even and added up"
        if one.sums * rows > MAX_PART_ROWS:
            return "its parts are too many"
        shared_bytes = one.shared_bytes(rows, gated=product.is_gated)
        return ProductTile(stages=min(SHARED_BYTES // shared_bytes, MAX_STAGES, rounds), **settings)

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        found: list[Settings] = []
        for outputs in (64, 128) if product.is_gated else (64, 128, 256):
            for num_warps in (4, 8):
                values = outputs * (2 if product.is_gated else 1) * max(rows, 64) // (num_warps * 32)
                for splits in (1, 2, 4, 8):
                    settings = {"outputs": outputs, "num_warps": num_warps, "splits": splits}
                    programs = -(-product.outputs // outputs) * splits
                    is_busy = busy_share(programs, card.num_sms) >= 0.45 and (
                        splits == 1 or programs <= 2 * card.num_sms
                    )
                    if values <= 128 and is_busy and isinstance(self.tile(product, rows, card, settings), ProductTile):
                        found.append(settings)
        return found
