"""Norms of numbers that lie on several ranks: what their operations are told, and how ranks meet for the squares."""

from __future__ import annotations

from dataclasses import dataclass
from enum import auto

import numpy as np

from twostroke.backends.cpu.arguments import Field
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.interface import Join
from twostroke.models.spec import Attention, GroupedAttention, Mamba2, ModelSpec


class SquaresField(Field):
    INPUT = auto()  # f32 [rows, stride]
    STRIDE = auto()
    WIDTH = auto()
    GATE = auto()  # f32 [rows, gate_stride]: by whose SiLU the input is multiplied in place; 0: by nothing
    GATE_STRIDE = auto()
    SUMS = auto()  # f32 [rows, sums_stride]
    SUMS_STRIDE = auto()
    ROWS = auto()


class ScaleField(Field):
    INPUT = auto()  # f32 [rows, stride], scaled in place
    STRIDE = auto()
    WIDTH = auto()
    WEIGHT = auto()  # f32 [width]
    EPSILON = auto()
    TOTAL_WIDTH = auto()  # of what is normed together, on all ranks
    SUMS = auto()  # f32 [rows, sums_stride]: of all ranks
    SUMS_STRIDE = auto()
    ROWS = auto()


@dataclass(frozen=True, slots=True)
class NormedGroup:
    """Numbers that are normed together: which of a layer's groups, and how many numbers it has on all ranks."""

    number: int
    width: int
    counts: bool = True
    """Whether this rank's squares are added: of ranks that hold the same numbers, one's are."""


@dataclass(frozen=True, slots=True, eq=False)
class RankSquares:
    """Of each row, the squares of the groups that this rank has numbers of: its own, and once ranks have met, all
    ranks'."""

    sums: Floats  # [rows, groups]
    groups: tuple[NormedGroup, ...]
    num_groups: int
    """That ranks meet for."""

    def place(self, index: int) -> int:
        return address_of(self.sums) + 4 * index

    def meet(self, join: Join, count: int) -> None:
        """Of the first rows."""
        found = np.zeros((count, self.num_groups), dtype=np.float32)
        for index, group in enumerate(self.groups):
            if group.counts:
                found[:, group.number] = self.sums[:count, index]
        join(found)
        self.sums[:count] = found[:, [group.number for group in self.groups]]


def norms_over_ranks(spec: ModelSpec) -> bool:
    return any(map(_is_normed_over_ranks, (layer.attention for layer in spec.layers)))


def _is_normed_over_ranks(own: Attention | None) -> bool:
    if isinstance(own, GroupedAttention):
        return own.wide_norms is not None
    return isinstance(own, Mamba2) and own.norm_part is not None
