"""How the experts' products are cut on Hopper, by the rows an expert gets on average: a table for each of the two, so
that nothing is tuned while a user waits, and everything it can give is known when kernels are compiled."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

DEPTH: Final = 64
"""Inputs a round: 128 bytes of each row, the widest that the copy engine spreads over shared memory's banks."""
SHARED_BYTES: Final = 226 * 1024
"""What a program may have."""


@dataclass(frozen=True, slots=True)
class HopperTile:
    """What a program takes at a time: so many rows by so many outputs (of gate and of up, each)."""

    rows: int
    outputs: int
    stages: int
    num_warps: int = 8
    rows_in_bulk: bool = False
    """Rows that lie in order come by TMA, too: all of a tile's, whether the expert has them or not."""
    pieces: int = 1
    """Results are stored in so many, each on its way through shared memory, which is the ring's otherwise."""

    def shared_bytes(self, *, gated: bool) -> int:
        ring = self.stages * DEPTH * 2 * (self.rows + self.outputs * (2 if gated else 1))
        return ring + 2 * self.rows * self.outputs // self.pieces + 8 * self.stages

    def unfit(self, num_inputs: int, num_outputs: int, *, gated: bool) -> str | None:
        """Why it cannot compute such a product, or None."""
        if num_inputs % DEPTH or num_outputs % self.outputs:
            return f"{num_inputs} inputs and {num_outputs} outputs are no multiples of {DEPTH} and {self.outputs}"
        if not 2 <= self.stages <= num_inputs // DEPTH:
            return f"{self.stages} stages are fewer than 2 or more than the {num_inputs // DEPTH} rounds"
        if self.shared_bytes(gated=gated) > SHARED_BYTES:
            return f"its {self.shared_bytes(gated=gated)} bytes of shared memory are too many"
        return None


# By the most rows an expert may have on average. None: the plain kernel is as fast.
GATE_UP_TILES: Final[dict[float, HopperTile | None]] = {40: None, math.inf: HopperTile(128, 128, 4)}
DOWN_TILES: Final[dict[float, HopperTile | None]] = {
    40: None,
    math.inf: HopperTile(128, 256, 4, rows_in_bulk=True, pieces=2),
}


def fitted(tile: HopperTile, num_inputs: int, num_outputs: int, *, gated: bool) -> HopperTile | None:
    """The tile, with fewer stages where the product has fewer rounds; None: it cannot compute that product."""
    tile = replace(tile, stages=min(tile.stages, num_inputs // DEPTH))
    return tile if tile.unfit(num_inputs, num_outputs, gated=gated) is None else None


@cache
def choose_hopper_tile(
    num_rows: int, num_experts: int, num_inputs: int, num_outputs: int, *, gated: bool
) -> HopperTile | None:
    """None: this product is another's to compute."""
    tiles = GATE_UP_TILES if gated else DOWN_TILES
    tile = next(tile for rows, tile in tiles.items() if num_rows <= rows * num_experts)
    return None if tile is None else fitted(tile, num_inputs, num_outputs, gated=gated)
