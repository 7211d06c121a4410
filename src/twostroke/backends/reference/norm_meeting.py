"""A norm of numbers that lie on several ranks: each sums the squares of its own, and they meet for the sums of all.
That is one number a token for each group that is normed together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from twostroke.backends.host.arithmetic import Array
from twostroke.backends.interface import Join


@dataclass(frozen=True, slots=True)
class NormMeeting:
    join: Join
    width: int
    """Of a group, on all ranks together."""
    group: int = 0
    """This rank's numbers are in."""
    num_groups: int = 1
    counts: bool = True
    """Whether its squares are added: of ranks that hold the same numbers, one's are."""

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """As `host.arithmetic.rms_norm` of all numbers of the group; of this rank's  # [num_tokens, own width]"""
        squares = np.zeros((len(x), self.num_groups), dtype=np.float32)
        if self.counts:
            squares[:, self.group] = np.square(x).sum(axis=-1)
        self.join(squares)
        mean_square = squares[:, self.group, None] / np.float32(self.width)
        normed: Array = x / np.sqrt(mean_square + np.float32(eps)) * weight
        return normed
