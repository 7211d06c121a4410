"""Rotary embeddings as a model declares them, and their frequencies. Standard library alone."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_context: int


@dataclass(frozen=True, slots=True)
class LinearScaling:
    factor: float


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Phi-3: one factor a frequency, one list for contexts up to the original maximum and one beyond it. Which one is
    in force is decided once, by the context the engine is configured for (see `RopeSpec.inverse_frequencies`): keys in
    the cache are rotated already, so a sequence that outgrew the short factors would have to be read anew."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_context: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """One divisor a frequency, as a GGUF file stores Llama 3's scaling: already worked out."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Frequencies that turn `fast_turns` times or more within the original context are kept, those that turn
    `slow_turns` times or fewer are stretched by `factor`, those between are blended by their place."""

    factor: float
    original_max_context: int
    attention_factor: float
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    truncates: bool = True
    """Whether the ends of the blend are whole places."""


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Gemma 4: the fastest `rotated_pairs` turn as they would in a head that is rotated whole, the others do not."""

    rotated_pairs: int
    factor: float = 1.0


RopeScaling = Llama3Scaling | LinearScaling | LongRopeScaling | FrequencyDivisors | YarnScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding over the first `dim` of a head's dimensions, pairing `i` with `i + dim / 2`. Where `dim` is 0,
    nothing is rotated."""

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    pairs_neighbours: bool = False
    """It pairs `2 i` with `2 i + 1` instead."""

    def inverse_frequencies(self, max_context: int) -> tuple[float, ...]:
        """[dim / 2] radians a position."""
        base = [self.theta ** -(index / self.dim) for index in range(0, self.dim, 2)]
        scaling = self.scaling
        if scaling is None:
            return tuple(base)
        if isinstance(scaling, LinearScaling):
            return tuple(frequency / scaling.factor for frequency in base)
        if isinstance(scaling, Llama3Scaling):
            return tuple(_llama3_frequency(frequency, scaling) for frequency in base)
        if isinstance(scaling, YarnScaling):
            return _yarn_frequencies(base, self.theta, scaling)
        if isinstance(scaling, ProportionalScaling):
            rotated = (frequency / scaling.factor for frequency in base[: scaling.rotated_pairs])
            return (*rotated, *(0.0 for _ in base[scaling.rotated_pairs :]))
        if isinstance(scaling, FrequencyDivisors):
            divisors = scaling.divisors
        else:
            beyond = max_context > scaling.original_max_context
            divisors = scaling.long_factors if beyond else scaling.short_factors
        return tuple(frequency / divisor for frequency, divisor in zip(base, divisors, strict=True))

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return self.scaling.attention_factor if isinstance(self.scaling, LongRopeScaling | YarnScaling) else 1.0


NO_ROPE = RopeSpec(1.0, 0)
"""Of attention that knows no positions: layers around it, which keep states, do."""


def _llama3_frequency(frequency: float, scaling: Llama3Scaling) -> float:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_context / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_max_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    span = scaling.high_frequency_factor - scaling.low_frequency_factor
    smooth = (scaling.original_max_context / wavelength - scaling.low_frequency_factor) / span
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def yarn_sharpness(factor: float, weight: float = 1.0) -> float:
    """YaRN's own choice of how much attention sharpens as the context is stretched."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_frequencies(base: list[float], theta: float, scaling: YarnScaling) -> tuple[float, ...]:
    dim = 2 * len(base)

    def place_of(turns: float) -> float:
        """Of the frequency that turns so often within the original context; a fraction between two."""
        return dim * math.log(scaling.original_max_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place_of(scaling.fast_turns), place_of(scaling.slow_turns)
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first or 0.001
    stretched = (min(max((place - first) / width, 0.0), 1.0) for place in range(len(base)))
    return tuple(
        share * frequency / scaling.factor + (1 - share) * frequency
        for share, frequency in zip(stretched, base, strict=True)
    )
