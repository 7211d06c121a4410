"""How packed matrices are laid out, kind by kind: as data, which packing writes by and tiles are generated from. Of 32
inputs of 16 outputs (a group) there are the numbers, in planes of bits, and what turns them into weights."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from twostroke.backends.cpu.arguments import BYTE_MIDDLE
from twostroke.models.weights.block_numbers import FP4_LEVELS, IQ4_LEVELS
from twostroke.models.weights.iq_grids import IQ1_LEVELS, IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS

GROUP_VALUES, STEPS = 32, 8
"""Inputs of a group, and the steps that a tile takes them in: four of them at once."""
BLOCK_GROUPS = 8
"""Groups that share scales where a kind has scales of scales."""


OPENED_GROUP_BYTES = 512 + 4 * 64
"""What a group takes in scratch at most, of a panel that is opened: a byte a weight, and four vectors of floats."""


class Scales(Enum):
    HALVES = auto()  # an f16 for each output
    POWERS = auto()  # a byte for each output: one more than the exponent of a float
    SIGNED_BYTES = auto()  # a signed byte for each output, times an f16 of the block
    NIBBLES = auto()  # a byte for each output: low, times an f16 of the block, the scale; high, times another, how far
    # the least weight lies below zero


@dataclass(frozen=True, slots=True)
class TileLayout:
    planes: tuple[int, ...]
    """Bits of a number, the lowest first, in planes, each with its width in bits. Step s of the eight that a tile
    takes (inputs 4 * (s // 2) + 16 * (s % 2) and the next three) has its bits of a plane w wide from bit s * w on, of
    those that an output's four bytes in each 64 hold. A single plane of eight bits takes its inputs in order."""
    middle: int = 0
    """The number that stands for zero, or where there are minimums for the middle of the weights' range. Integer sums
    count from there, so that minimums, moved there too, are small: their rounding matters little."""
    levels: tuple[int, ...] = ()
    """Where numbers are codes: what they stand for. Tiles see them raised by BYTE_MIDDLE."""
    scales: Scales = Scales.HALVES
    scale_sets: int = 1
    """Scales that an output has in a group: one, or one for each half."""
    has_minimums: bool = False
    """An f16 for each output and group is added."""

    @property
    def number_bytes(self) -> int:
        return 64 * sum(self.planes)

    @property
    def group_bytes(self) -> int:
        each = {Scales.HALVES: 32, Scales.POWERS: 16, Scales.SIGNED_BYTES: 16, Scales.NIBBLES: 16}[self.scales]
        return self.number_bytes + each * (self.scale_sets + self.has_minimums)

    @property
    def shared_bytes(self) -> int:
        """What a block of groups has behind them."""
        return {Scales.SIGNED_BYTES: 32, Scales.NIBBLES: 64}.get(self.scales, 0)

    @property
    def has_half_minimums(self) -> bool:
        return self.scales is Scales.NIBBLES

    @property
    def is_biased(self) -> bool:
        """Whether bytes that tiles multiply are raised by BYTE_MIDDLE."""
        return bool(self.levels) or self.middle == BYTE_MIDDLE

    @property
    def alignment(self) -> int:
        """Of any group."""
        return min(32, self.group_bytes & -self.group_bytes)


def _eight(signed: tuple[int, ...]) -> tuple[int, ...]:
    """Levels of a codebook of three bits; the last two are not used."""
    return (*sorted(signed), 0, 0)


def _both_signs(levels: tuple[int, ...]) -> tuple[int, ...]:
    return (*(-level for level in reversed(levels)), *levels)


_FLOATS = {"F32": 4, "F16": 2, "BF16": 2}


class TileKind(Enum):
    """Kinds of packed matrix; of floats, one input of 16 outputs after the other."""

    Q4_1 = TileLayout((4,), 8, has_minimums=True)
    Q4_0 = TileLayout((4,), 8)
    Q5_K = TileLayout((4, 1), 16, has_minimums=True)
    Q5_0 = TileLayout((4, 1), 16)
    Q6_K = TileLayout((4, 2), 32, scale_sets=2)
    Q8_0 = TileLayout((8,), BYTE_MIDDLE)
    Q3_K = TileLayout((2, 1), 4, scales=Scales.SIGNED_BYTES, scale_sets=2)
    Q2_K = TileLayout((2,), scales=Scales.NIBBLES, scale_sets=2)
    TQ2_0 = TileLayout((2,), 1)
    IQ4_NL = TileLayout((4,), levels=IQ4_LEVELS)
    IQ3_XXS = TileLayout((4,), levels=_both_signs(IQ3_XXS_LEVELS))
    IQ3_S = TileLayout((4,), levels=_both_signs(IQ3_S_LEVELS))
    IQ2_S = TileLayout((2, 1), levels=_eight(_both_signs(IQ2_LEVELS)), scale_sets=2)
    IQ1_M = TileLayout((2, 1), levels=_eight(tuple(8 * v + e for v in IQ1_LEVELS for e in (-1, 1))), scale_sets=2)
    MXFP4 = TileLayout((4,), levels=FP4_LEVELS, scales=Scales.POWERS)
    NVFP4 = TileLayout((4,), levels=FP4_LEVELS, scale_sets=2)
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"

    @property
    def is_quantised(self) -> bool:
        return isinstance(self.value, TileLayout)

    @property
    def layout(self) -> TileLayout:
        assert isinstance(self.value, TileLayout)
        return self.value

    @property
    def group_values(self) -> int:
        return GROUP_VALUES if self.is_quantised else 1

    @property
    def group_bytes(self) -> int:
        """Of one 16-output tile, but for what blocks of groups share."""
        return self.layout.group_bytes if self.is_quantised else 16 * _FLOATS[self.name]

    @property
    def shared_bytes(self) -> int:
        return self.layout.shared_bytes if self.is_quantised else 0

    def tile_bytes(self, depth: int) -> int:
        groups = depth // self.group_values
        return groups * self.group_bytes + groups // BLOCK_GROUPS * self.shared_bytes
