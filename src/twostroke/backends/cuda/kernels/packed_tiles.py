"""How products with packed weights are cut, by their shape: rules, so that nothing is tuned while a user waits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from twostroke.backends.cuda.kernels.packed_format import DEPTH, ROUND_BYTES, UNIT_ROWS

SHARED_BYTES: Final = 225 * 1024
"""What a program on a Hopper chip may have, less room for barriers."""
ALIGNMENT: Final = 1024
MAX_STAGES: Final = 16
MAX_SPLITS: Final = 8
MAX_DENSE_ROWS: Final = 256
DENSE_ROWS: Final = (8, 16, 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, MAX_DENSE_ROWS)
EXPERT_ROWS: Final = (8, 16, 24, 32, 40, 56)
"""Tokens that a program multiplies with, of a dense product and of an expert: kernels are compiled for these alone."""
MAX_AVERAGE_ROWS: Final = 40
"""Of an expert: there packed products are a seventh faster than others where rows are spread evenly, and 3% or more
slower where the busiest expert has five times its share. Beyond, few experts' rows fit into one tile, and gates by
higher ones are slower than plain ones."""
MAX_EXPERTS: Final = 256
"""Whose rows' places find room beside the ring."""
GATE_GROUPS: Final = (2, 2)
DOWN_GROUPS: Final = (4, 1)
"""Warp groups and units of each, for experts: of gates, whose rows come from anywhere, fewer warps wait less often."""
MAX_WHOLE_ROWS: Final = 240
"""Of products whose depth is not divided: plain tiles of 256 rows are as good."""
MAX_TURNS_ROWS: Final = 96
"""Beyond, groups that take turns are no faster than plain products."""
FEW_ROWS: Final = 64
"""Up to here a round is unpacked as a whole, so that a group's rounds must be an even number; more rows' sums leave no
registers for that."""
MANY_SUMS: Final = 320
MOST_SUMS: Final = 384
"""Rows times a group's units whose sums leave registers for half a round, and for a quarter."""
MIN_WEIGHTS: Final = 1 << 24
"""Of smaller matrices a product is mostly its own begin and end."""
ENOUGH: Final = 0.75
"""Of a device's multiprocessors: as many programs keep its memory busy."""
LEAST_ROUNDS: Final = 32
"""That a program should have for itself: with fewer, programs of half the outputs divide the depth less often."""


@dataclass(frozen=True, slots=True)
class PackedTile:
    """What a program computes at a time: all outputs of `groups` times `units` units, of so many tokens."""

    rows: int
    groups: int
    units: int = 1
    stages: int = MAX_STAGES
    splits: int = 1
    """Parts of the depth, whose sums the product's reader adds up."""
    shared: bool = False
    """Groups have the same units and take turns in their rounds, where there are too few units for all programs."""

    @property
    def tile_units(self) -> int:
        return self.units if self.shared else self.groups * self.units

    @property
    def steps(self) -> int:
        """Quarters of a round that are unpacked and multiplied together: the more sums there are, the fewer."""
        return 4 if self.rows <= FEW_ROWS else 2 if self.rows * self.units <= MANY_SUMS else 1

    @property
    def rounds_at_once(self) -> int:
        """A program's rounds are a multiple of so many; a kernel would wait for ever for one that is missing."""
        return (self.groups if self.shared else 1) * (2 if self.steps == 4 else 1)

    @property
    def stage_bytes(self) -> int:
        return self.rows * DEPTH * 2 + self.tile_units * ROUND_BYTES

    @property
    def held_stages(self) -> int:
        """Of groups that take turns each has stages of its own: a barrier tells a lap from the one before it, and no
        more, so whoever waits there must have met it in every lap."""
        stages = min(self.stages, (SHARED_BYTES - ALIGNMENT) // self.stage_bytes)
        return stages - stages % self.groups if self.shared else stages

    @property
    def shared_bytes(self) -> int:
        return self.held_stages * self.stage_bytes + ALIGNMENT

    def constants(self) -> dict[str, int]:
        return {
            "ROWS": self.rows,
            "GROUPS": self.groups,
            "UNITS": self.units,
            "SHARED": int(self.shared),
            "STAGES": self.held_stages,
            "STEPS": self.steps,
        }


@cache
def choose_packed_tile(
    rows: int,
    units: int,
    rounds: int,
    num_sms: int,
    *,
    gated: bool = False,
    may_split: bool = False,
    is_float32: bool = False,
) -> PackedTile | None:
    """Of a matrix of so many units, so many rounds deep. None: the plain matrix is as good, or the shape does not fit.
    `bench/cuda/packed.py` found these best, or nearly, on an H200."""
    if rows > MAX_DENSE_ROWS or units * rounds * UNIT_ROWS * DEPTH < MIN_WEIGHTS:
        return None
    held = next(size for size in DENSE_ROWS if rows <= size)
    if may_split:
        tile = _split(PackedTile(held, 2), units, rounds, num_sms)
        if rounds // tile.splits < LEAST_ROUNDS:
            tile = _split(PackedTile(held, 2, shared=True), units, rounds, num_sms)
    elif -(-units // 2) >= ENOUGH * num_sms:
        if rows > MAX_WHOLE_ROWS:
            return None
        has_fours = -(-units // 4) >= ENOUGH * num_sms
        if held <= FEW_ROWS:  # the fewer units, the longer the ring; a head's many tiles need less of one
            tile = PackedTile(held, 4 if is_float32 and has_fours else 2)
        else:
            tile = PackedTile(held, 2, 2 if has_fours and 2 * held <= MOST_SUMS else 1)
    else:
        tile = PackedTile(held, 2, shared=True)
        if gated or rows > MAX_TURNS_ROWS:
            return None
    return tile if _fits(tile, units, rounds, num_sms) else None


def _split(tile: PackedTile, units: int, rounds: int, num_sms: int) -> PackedTile:
    programs, splits = -(-units // tile.tile_units), 1
    while 2 * splits <= MAX_SPLITS and rounds % (2 * splits) == 0 and 2 * splits * programs <= num_sms:
        splits *= 2
    return replace(tile, splits=splits)


def _fits(tile: PackedTile, units: int, rounds: int, num_sms: int) -> bool:
    is_whole = rounds % (tile.splits * tile.rounds_at_once) == 0
    return is_whole and (not tile.shared or -(-units // tile.tile_units) * tile.splits <= num_sms)


@cache
def choose_experts_tile(num_rows: int, experts: int, rounds: int, *, gated: bool) -> PackedTile | None:
    """For so many rows in all: nearly every expert should have no more than one tile of them. None: so many that plain
    matrices are as good, or a depth that does not fit."""
    average = num_rows / experts
    if average > MAX_AVERAGE_ROWS or rounds % 2:
        return None
    wanted = average + 1.9 * average**0.5
    return experts_tile(next(size for size in EXPERT_ROWS if wanted <= size), gated=gated)


def experts_tile(rows: int, *, gated: bool) -> PackedTile:
    return PackedTile(rows, *(GATE_GROUPS if gated else DOWN_GROUPS))
