"""By how much steps of each number of rows differ from what the terms of their cost say: matrix products come in tiles,
and three rows may take longer than four. Learnt from steps as they are measured."""

from __future__ import annotations

MAX_ROWS = 64
"""More rows fill their tiles so well that the terms suffice."""
FADES = 0.9
PRIOR_WEIGHT = 3.0
"""Steps' worth of experience in which the terms were right."""
MOST = 2.0
"""A step that is further off was held up by something else."""


class RowFactors:
    def __init__(self) -> None:
        self._weights = [0.0] * (MAX_ROWS + 1)
        self._sums = [0.0] * (MAX_ROWS + 1)

    def of(self, num_rows: int) -> float:
        if num_rows > MAX_ROWS:
            return 1.0
        return (PRIOR_WEIGHT + self._sums[num_rows]) / (PRIOR_WEIGHT + self._weights[num_rows])

    def learn(self, num_rows: int, ratio: float) -> None:
        """`ratio`: what a step took, beside what its terms said."""
        if num_rows <= MAX_ROWS:
            self._weights[num_rows] = FADES * self._weights[num_rows] + 1.0
            self._sums[num_rows] = FADES * self._sums[num_rows] + min(MOST, max(1.0 / MOST, ratio))
