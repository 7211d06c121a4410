"""What positions do to queries and keys. Cosines and sines of the rotary embedding are computed when a position is
first reached. They are filled in runs of fixed places, so a position's numbers are the same whatever was asked for
first."""

from __future__ import annotations

import numpy as np

from twostroke.backends.cpu.memory import Floats, float_zeros
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention, LatentAttention, ModelSpec, QueryGrowth

_RUN = 1024


class RotationTable:
    def __init__(self, rope: RopeSpec, max_context: int) -> None:
        self._frequencies = np.asarray(rope.inverse_frequencies(max_context))
        self._factor = rope.attention_factor
        self._filled = 0
        self.half = len(self._frequencies)
        # Memory is untouched, and so costs nothing, until it is filled.
        self.cosines = float_zeros(max_context, self.half)
        self.sines = float_zeros(max_context, self.half)
        self.reach(0)  # the first run is part of loading: every prompt needs it

    def reach(self, position: int) -> None:
        """Make positions up to this one available."""
        while self._filled <= position:
            end = min(self._filled + _RUN, len(self.cosines))
            # In float64: at position 100,000 a float32 angle is off by a hundredth of a radian.
            angles = np.arange(self._filled, end)[:, None] * self._frequencies
            self.cosines[self._filled : end] = np.cos(angles) * self._factor
            self.sines[self._filled : end] = np.sin(angles) * self._factor
            self._filled = end


class Positions:
    """The tables of one model."""

    def __init__(self, spec: ModelSpec, max_context: int) -> None:
        attentions = [layer.attention for layer in spec.layers]
        known = [one for one in attentions if isinstance(one, GroupedAttention | LatentAttention)]
        self.rotations = {rope: RotationTable(rope, max_context) for rope in {one.rope for one in known}}
        growths = {one.growth for one in known if one.growth is not None}
        self._growths = {growth: _growth_factors(growth, max_context) for growth in growths}

    def growth(self, growth: QueryGrowth | None) -> Floats | None:
        """What queries are multiplied by  # [max_context]; None: by nothing"""
        return None if growth is None else self._growths[growth]

    def reach(self, position: int) -> None:
        """Make positions up to this one available."""
        for rotation in self.rotations.values():
            rotation.reach(position)


def _growth_factors(growth: QueryGrowth, max_context: int) -> Floats:
    factors = float_zeros(max_context)
    factors[:] = 1 + growth.beta * np.log(1 + np.arange(max_context) // growth.context)
    return factors
