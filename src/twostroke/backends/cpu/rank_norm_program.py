"""Where the tape of a rank stops for ranks to meet, and the norms that they meet for: over heads of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from twostroke.backends.cpu.arguments import Wait, float_bits
from twostroke.backends.cpu.memory import Floats, address_of
from twostroke.backends.cpu.rank_norms import NormedGroup, RankSquares, ScaleField, SquaresField
from twostroke.backends.cpu.row_operations import Columns, RowOperations, Rows
from twostroke.models.spec import WideNorms


@dataclass(frozen=True, slots=True)
class Break:
    """Where the tape stops for ranks to meet."""

    place: int  # the entry that it is before
    rows: Rows
    adds: bool = True
    """Whether the host adds what ranks found to the residual; else an entry behind it does, through a norm."""
    squares: RankSquares | None = None
    """Where they meet for a norm alone."""


class RankNormOperations(RowOperations):
    """Adds them to a tape. What follows a norm without a wait must take the same rows."""

    breaks: list[Break]
    _wide_sums: Floats
    """[rows, 2] of the squares of queries, and of keys."""

    def _add_norms_over_ranks(
        self, wide: WideNorms, columns: Sequence[Columns], norms: Sequence[Floats | None]
    ) -> None:
        """Of queries, and of keys, over the heads of all ranks."""
        groups = NormedGroup(0, wide.query_width), NormedGroup(1, wide.kv_width, wide.counts_keys)
        squares = RankSquares(self._wide_sums, groups, len(groups))
        self._add_squares(squares, columns)
        for index, (source, norm) in enumerate(zip(columns, norms, strict=True)):
            self._add_scale(squares, index, source, norm, self._spec.norm_eps, Wait.NEVER)

    def _add_squares(self, squares: RankSquares, sources: Sequence[Columns], gate: Columns | None = None) -> None:
        """Of some columns, each a group's; then ranks meet."""
        for index, source in enumerate(sources):
            fields: dict[IntEnum, int] = {
                SquaresField.INPUT: source.place,
                SquaresField.STRIDE: source.stride,
                SquaresField.WIDTH: source.width,
                SquaresField.SUMS: squares.place(index),
                SquaresField.SUMS_STRIDE: squares.sums.shape[1],
                SquaresField.ROWS: self._rows.count,
            }
            if gate is not None:
                fields |= {SquaresField.GATE: gate.place, SquaresField.GATE_STRIDE: gate.stride}
            self.tape.add("squares", fields, wait=Wait.NEVER)
        self.breaks.append(Break(len(self.tape.names), self._rows, squares=squares))

    def _add_scale(
        self, squares: RankSquares, index: int, source: Columns, weight: Floats | None, epsilon: float, wait: Wait
    ) -> None:
        """Behind that: the columns of one group, normed."""
        fields: dict[IntEnum, int] = {
            ScaleField.INPUT: source.place,
            ScaleField.STRIDE: source.stride,
            ScaleField.WIDTH: source.width,
            ScaleField.WEIGHT: address_of(weight),
            ScaleField.EPSILON: float_bits(epsilon),
            ScaleField.TOTAL_WIDTH: squares.groups[index].width,
            ScaleField.SUMS: squares.place(index),
            ScaleField.SUMS_STRIDE: squares.sums.shape[1],
            ScaleField.ROWS: self._rows.count,
        }
        self.tape.add("scale", fields, wait=wait)
