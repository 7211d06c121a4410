"""Decides how products with weights of few bits are cut: what a tile takes of the chip, and which tiles are worth
measuring. A table says which one a product gets."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as all_of
from typing import Final

from twostroke.backends.cuda.kernels.packed_format import TWELVE, Code, can_pack, units_of
from twostroke.backends.cuda.kernels.product import MAX_PART_ROWS, Card, Product, Settings, busy_share, declines

SHARED_BYTES: Final = 228 * 1024
"""The shared memory of one of Hopper's multiprocessors, for all its programs."""
OWN_BYTES: Final = 3 * 1024
"""What each program takes of it for itself, with room for barriers."""
PACKED_SHARED_BYTES: Final = SHARED_BYTES - OWN_BYTES
"""What a program may have of it that runs alone on its multiprocessor."""
ALIGNMENT: Final = 1024
MAX_STAGES: Final = 16
LEAST_STAGES: Final = 3
MAX_DENSE_ROWS: Final = 256
DENSE_ROWS: Final = (8, 16, 32, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, MAX_DENSE_ROWS)
"""How many tokens a program of a dense product multiplies at a time. Kernels are compiled for these numbers alone."""
WHOLE_ROUND_ROWS: Final = 64
"""Up to this many rows a round is unpacked as a whole, and a group's rounds must be an even number. The sums of more
rows leave no registers for that."""
MANY_SUMS: Final = 320
LEAST_SHARE: Final = 0.6
"""The share of multiprocessors that programs must keep busy for a tile to be worth measuring."""
MOST_ROWS_OF_TWO: Final = 32
"""The most rows if two programs run at once, with two groups of one unit each: they have half the registers."""
MOST_SUMS: Final = {2: 384, 3: 192, 4: 128}
"""The most rows times units of a group, by the number of groups. More sums leave no registers for anything else;
MANY_SUMS is the most that leaves room for half a round."""


@dataclass(frozen=True, slots=True)
class PackedTile:
    """What a program computes at a time: all outputs of `groups` times `units` units, for `rows` tokens."""

    rows: int
    groups: int
    units: int = 1
    stages: int = MAX_STAGES
    splits: int = 1  # parts of the depth; the product's reader adds their sums up
    shared: bool = False
    """Whether groups have the same units and take turns in their rounds. That helps if there are too few units for all
    programs."""
    code: Code = TWELVE
    at_once: int = 1
    """How many programs a multiprocessor runs beside each other: while one waits or begins, another multiplies."""

    @property
    def sums(self) -> int:
        return self.splits if self.splits > 1 else 0

    @property
    def tile_units(self) -> int:
        return self.units if self.shared else self.groups * self.units

    @property
    def steps(self) -> int:
        """How many quarters of a round are unpacked and multiplied together: the more sums there are, the fewer."""
        return 4 if self.rows <= WHOLE_ROUND_ROWS else 2 if self.rows * self.units <= MANY_SUMS else 1

    @property
    def rounds_at_once(self) -> int:
        """A program's rounds must be a multiple of this. A kernel would wait for ever for a round that is missing."""
        return (self.groups if self.shared else 1) * (2 if self.steps * 16 == self.code.depth else 1)

    @property
    def stage_bytes(self) -> int:
        own = self.rows * self.code.depth * 2 + self.tile_units * self.code.unit_bytes
        return -(-own // ALIGNMENT) * ALIGNMENT

    @property
    def most_shared_bytes(self) -> int:
        return SHARED_BYTES // self.at_once - OWN_BYTES

    @property
    def held_stages(self) -> int:
        """How many stages fit. Groups that take turns have stages of their own: a barrier only tells a lap from the one
        before it, so a group that waits there must have met it in every lap."""
        stages = min(self.stages, (self.most_shared_bytes - ALIGNMENT) // self.stage_bytes)
        return stages - stages % self.groups if self.shared else stages

    @property
    def least_stages(self) -> int:
        """The fewest stages. Rounds of codes of eight bits and fewer are twice as deep, so two of them are four of
        twelve bits."""
        return LEAST_STAGES if self.code is TWELVE else 2

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
            "AT_ONCE": self.at_once,
            **self.code.constants(),
        }

    def programs(self, product: Product) -> int:
        return -(-units_of(product.shape[-2]) // self.tile_units) * self.splits

    def fault(self, product: Product, rows: int, num_sms: int) -> str | None:
        sums = self.units * self.rows
        most_sums = MOST_SUMS[self.groups] if self.code is TWELVE else min(MOST_SUMS[self.groups], MANY_SUMS)
        if sums > most_sums or self.held_stages < max(self.least_stages, 2 * self.groups * self.shared):
            return "it does not fit on a multiprocessor"
        if self.code.rounds(product.width) % (self.splits * self.rounds_at_once):
            return "its rounds are uneven"
        fits_twice = (self.at_once, self.groups, self.units) == (2, 2, 1) and self.rows <= MOST_ROWS_OF_TWO
        if self.at_once != 1 and not fits_twice:
            return "two programs at once are of two groups with a unit each, of few rows"
        if self.splits > 1 and (not product.adds_parts or self.splits * rows > MAX_PART_ROWS):
            return "nobody adds up its parts, or they are too many"
        if self.shared and (product.is_gated or self.programs(product) > num_sms * self.at_once):
            return "groups that take turns have one tile each, and no gate"
        # Groups that take turns add their sums up in the ring.
        if self.shared and self.groups * self.units * self.rows // 8 * 128 * 16 > self.held_stages * self.stage_bytes:
            return "its sums do not fit into its ring"
        return None


class PackedProducts:
    """The kernel of products with packed weights of one code."""

    fuses = False

    def __init__(self, code: Code = TWELVE, most_by_rule: int = MAX_DENSE_ROWS) -> None:
        """`most_by_rule` is the most rows that it takes if no table has a line."""
        self.name = self.form = code.name
        self._code, self._most_by_rule = code, most_by_rule

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> PackedTile | str:
        if rows > MAX_DENSE_ROWS or product.experts:
            return f"it takes {MAX_DENSE_ROWS} rows at most, of one matrix"
        if self._code is TWELVE and not can_pack(product.shape, is_gated=product.is_gated):
            return "its weights have no packed form"
        if (reason := declines(product, card, adds_bias=self._code is not TWELVE)) is not None:
            return reason
        if not settings and self._code is not TWELVE:
            return self._by_rule(product, rows, card)
        tile = self._cut(rows, settings)
        return tile.fault(product, rows, card.num_sms) or tile

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        """Returns the settings of tiles that keep most multiprocessors busy."""
        found = []
        for settings, tile in self._accepted(product, rows, card):
            programs, room = tile.programs(product), card.num_sms * tile.at_once
            is_worth_it = busy_share(programs, room) >= LEAST_SHARE and (tile.splits == 1 or programs <= room)
            found += [settings] if is_worth_it else []
        return found

    def _accepted(self, product: Product, rows: int, card: Card) -> list[tuple[Settings, PackedTile]]:
        found = []
        cuts = all_of((2, 4), (1, 2), (1, 2, 4, 8), (False, True), (1, 2))
        for groups, units, splits, shared, at_once in cuts:
            settings = {"groups": groups, "units": units, "splits": splits, "shared": shared, "at_once": at_once}
            tile = self.tile(product, rows, card, settings)
            found += [(settings, tile)] if isinstance(tile, PackedTile) else []
        return found

    def _by_rule(self, product: Product, rows: int, card: Card) -> PackedTile | str:
        """Returns a tile for a product that no table has a line for. It runs two programs at once if there are enough
        of them and rows are few. Otherwise it keeps most multiprocessors busy, in as few parts as that takes."""
        if rows > self._most_by_rule:
            return f"of more than {self._most_by_rule} rows others are faster"

        def merit(tile: PackedTile) -> tuple[float, ...]:
            programs = tile.programs(product)
            share = busy_share(programs, card.num_sms)
            return round(share, 1), programs <= card.num_sms, -tile.splits, -tile.groups, -tile.units

        def fills_twice(tile: PackedTile) -> bool:
            return tile.at_once == 2 and LEAST_SHARE <= tile.programs(product) / (2 * card.num_sms) <= 1

        tiles = [tile for _, tile in self._accepted(product, rows, card)]
        if pairs := [tile for tile in tiles if fills_twice(tile)]:
            return max(pairs, key=lambda tile: tile.programs(product))
        alone = [tile for tile in tiles if tile.at_once == 1]
        return max(alone, key=merit) if alone else "no tile of it fits"

    def _cut(self, rows: int, settings: Settings) -> PackedTile:
        return PackedTile(next(size for size in DENSE_ROWS if rows <= size), **settings, code=self._code)
