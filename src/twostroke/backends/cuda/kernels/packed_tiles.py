"""How products with packed weights are cut, by their shape: rules, so that nothing is tuned while a user waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twostroke.backends.cuda.kernels.packed_weights import DEPTH, ROUND_BYTES

SHARED_BYTES: Final = 225 * 1024
"""What a program on a Hopper chip may have, less room for barriers."""
ALIGNMENT: Final = 1024
MAX_STAGES: Final = 16


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
    def stage_bytes(self) -> int:
        return self.rows * DEPTH * 2 + self.tile_units * ROUND_BYTES

    @property
    def held_stages(self) -> int:
        return min(self.stages, (SHARED_BYTES - ALIGNMENT) // self.stage_bytes)

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
        }
