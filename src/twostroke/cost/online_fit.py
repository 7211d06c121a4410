"""Non-negative least squares, one observation at a time, in bounded memory: sums of squares and products a kind of
observation, each kind forgetting only its own past, so that a long quiet time of one kind does not wipe out what others
taught. Knows nothing of steps."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import mul

FORGETTING = 0.02
"""What a kind forgets of its past with each observation: about fifty of them count."""
PRIOR_WEIGHT = 0.01
"""How firmly a coefficient keeps its first value where observations say nothing; one observation of a term that makes
up all of the time weighs 1."""
SWEEPS = 3
"""Of coordinate descent, after each observation: it starts where the last one left off."""


class _Kind:
    """The decayed sums of one kind of observation."""

    __slots__ = ("moments", "products")

    def __init__(self, size: int) -> None:
        self.products = [[0.0] * size for _ in range(size)]  # [size, size]: sum of term x term
        self.moments = [0.0] * size  # sum of term x target


class OnlineFit:
    """Minimises the sum of (terms . coefficients - target)^2 over what it was shown, with no coefficient below 0."""

    def __init__(self, prior: Sequence[float]) -> None:
        size = len(prior)
        self.coefficients = list(prior)
        self._kinds: dict[Hashable, _Kind] = {}
        self._products = [[PRIOR_WEIGHT if row == column else 0.0 for column in range(size)] for row in range(size)]
        self._moments = [PRIOR_WEIGHT * value for value in prior]

    def observe(self, kind: Hashable, terms: Sequence[float], target: float) -> None:
        """`terms` and `target` come weighted: divided by what an error of 1 means to the caller."""
        sums = self._kinds.get(kind)
        if sums is None:
            sums = self._kinds[kind] = _Kind(len(terms))
        for row, term in enumerate(terms):
            kept = sums.products[row]
            # Both sums move by the same change: the new product, less what the kind forgets.
            change = [term * other - FORGETTING * old for other, old in zip(terms, kept, strict=True)]
            sums.products[row] = [old + more for old, more in zip(kept, change, strict=True)]
            whole = self._products[row]
            self._products[row] = [old + more for old, more in zip(whole, change, strict=True)]
            moment = term * target - FORGETTING * sums.moments[row]
            sums.moments[row] += moment
            self._moments[row] += moment
        self.descend(SWEEPS)

    def descend(self, sweeps: int) -> None:
        """Coordinate descent: each coefficient in turn goes where it is best beside the others, or to 0."""
        coefficients = self.coefficients
        for _ in range(sweeps):
            for index, row in enumerate(self._products):
                gap = self._moments[index] - sum(map(mul, row, coefficients))
                coefficients[index] = max(0.0, coefficients[index] + gap / row[index])
