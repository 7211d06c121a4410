"""How products of 16-bit weights are cut for Hopper's clusters: what a tile takes of the chip, and which are worth
measuring. Which one a product gets is a table's to say."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as all_of
from typing import Final

from twostroke.backends.cuda.kernels.product import DEPTH, MAX_PART_ROWS, Card, Product, Settings, declines, settings_of

CLUSTER_SHARED_BYTES: Final = 226 * 1024
"""What a program on a Hopper chip may have, less its barriers."""
ALIGNMENT: Final = 1024
LEAST_STAGES: Final = 3
OUTPUTS: Final = (32, 48, 64, 96, 112, 128, 160, 176, 192, 224, 256)
MOST_TRIED: Final = 6
"""Of tiles that divide the depth, and of others."""
MOST_SUMS: Final = 384
"""Outputs times a warp group's blocks of rows: half as many sums a thread leave it registers to work with."""
PIECE_OUTPUTS: Final = {1: 256, 2: 256, 3: 192, 4: 128}
"""An instruction has 256 outputs at most, and wants all its sums in the registers that a launch hands out: the more
warp groups, the fewer."""


@dataclass(frozen=True, slots=True)
class ClusterTile:
    """How a product is cut: a program computes `outputs` outputs (with a gate: half of them gates) of `rows` rows."""

    outputs: int
    row_blocks: int  # blocks of 64 rows a warp group
    groups: int  # warp groups
    cluster: int = 2  # programs that fetch rows for one another, or divide the depth between them and add up
    is_split: bool = False
    parts: int = 1  # clusters that divide a split depth: the reader adds up what they leave

    @property
    def sums(self) -> int:
        return self.parts if self.is_split else 0

    @property
    def splits(self) -> int:
        return self.cluster * self.parts if self.is_split else 1

    @property
    def rows(self) -> int:
        return 64 * self.row_blocks * self.groups

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.outputs) * 2 * DEPTH

    @property
    def stages(self) -> int:
        return (CLUSTER_SHARED_BYTES - ALIGNMENT) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """The ring; where the depth is split it holds the sums in the end, with rows set off against each other."""
        sums = self.rows * (self.outputs + 8) * 4 if self.is_split else 0
        return max(self.stages * self.stage_bytes, sums) + ALIGNMENT

    @property
    def pieces(self) -> int:
        """Instructions for a program's outputs."""
        return -(-self.outputs // PIECE_OUTPUTS[self.groups])

    def copied_rows(self, rows: int) -> int:
        """What of them comes to a program in one copy: hardly more than there are."""
        return next((box for box in (16, 32, 64, 128) if rows <= box <= self.rows), self.rows)

    def programs(self, product: Product, rows: int) -> int:
        columns = self.outputs // 2 if product.is_gated else self.outputs
        return -(-rows // self.rows) * -(-product.outputs // columns) * self.splits

    def work(self, product: Product, rows: int, card: Card) -> float:
        """What the busiest multiprocessor has to do: to read, of few rows, or to multiply."""
        size = self.rows * self.outputs if rows > 256 else self.copied_rows(rows) + self.outputs
        return -(-self.programs(product, rows) // card.num_sms) * size / self.splits

    def fault(self, product: Product, rows: int) -> str | None:
        if self.outputs % (8 * self.pieces) or self.outputs % (16 if product.is_gated else 8):
            return "its outputs are not instructions of eights"
        if (
            self.stages < LEAST_STAGES
            or self.shared_bytes > CLUSTER_SHARED_BYTES
            or self.row_blocks * self.outputs > MOST_SUMS
        ):
            return "it does not fit on a multiprocessor"
        if self.is_split and not product.adds_parts:
            return "nobody adds up its parts"
        if product.width % (DEPTH * self.splits) or self.sums * rows > MAX_PART_ROWS:
            return "its parts are uneven, or too many"
        return None


class ClusterProducts:
    name, form, fuses = "cluster", "plain", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> ClusterTile | str:
        tile = ClusterTile(**settings)
        return declines(product, card) or tile.fault(product, rows) or tile

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """Those that leave the busiest multiprocessor least to do."""
        shapes = [(1, 1)] if rows <= 64 else [(1, 2)] if rows <= 128 else [(1, 2), (1, 3), (2, 2)]
        ways = [(1, False, 1), (2, False, 1)]
        if product.adds_parts and rows <= 256:
            ways += [(1, True, 2), (1, True, 4), (1, True, 8), (2, True, 1), (2, True, 2)]
        found: dict[bool, list[ClusterTile]] = {False: [], True: []}
        for (row_blocks, groups), outputs, way in all_of(shapes, OUTPUTS, ways):
            tile = ClusterTile(outputs, row_blocks, groups, *way)
            if declines(product, card) is None and tile.fault(product, rows) is None:
                found[tile.is_split].append(tile)
        best = [sorted(tiles, key=lambda tile: tile.work(product, rows, card))[:MOST_TRIED] for tiles in found.values()]
        return [settings_of(tile) for tiles in best for tile in tiles]
