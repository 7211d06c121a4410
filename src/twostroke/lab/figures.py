"""Figures and their floors. Every time that was measured has a twin on the floor clock, on which each step takes the
least time that the hardware allows for exactly its work."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from twostroke.cost.floor import StepWork, decode_floor_s, prefill_floor_s, step_floor_s
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.lab.stage import Stream


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    """Ends in its unit: `_ms` and `_s` are times, `_tok_s` are tokens a second, `_tok` are tokens."""
    value: float
    floor: float | None = None
    """The best value that the hardware allows, in the same unit; None: physics sets none."""

    @property
    def is_rate(self) -> bool:
        return self.name.endswith("_tok_s")

    @property
    def fraction(self) -> float | None:
        """How much of what the hardware allows was reached: 1 is all of it."""
        if self.floor is None or not self.value or not self.floor:
            return None
        return self.value / self.floor if self.is_rate else self.floor / self.value


def milliseconds(name: str, value_s: float, floor_s: float | None = None) -> Figure:
    return Figure(f"{name}_ms", 1e3 * value_s, None if floor_s is None else 1e3 * floor_s)


def percentile(values: Iterable[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


@dataclass(frozen=True, slots=True)
class Gap:
    """From one token of a stream to the next; several that one step brought come at one moment."""

    seconds: float
    floor_s: float
    last_step: int
    """The step that ended it."""


class Floors:
    """What this machine allows this model, and what it allowed the steps of one run."""

    def __init__(self, shape: ModelShape, ceilings: Ceilings, steps: Sequence[StepWork]) -> None:
        self._shape = shape
        self._ceilings = ceilings
        # The floor clock: its reading after each step.
        self._clock_s = list(accumulate((step_floor_s(shape, step, ceilings) for step in steps), initial=0.0))

    @property
    def run_s(self) -> float:
        """All steps of the run."""
        return self._clock_s[-1]

    def ttft_s(self, prompt_len: int, cached_tokens: int = 0) -> float:
        """Of a prompt alone on an idle machine."""
        return prefill_floor_s(self._shape, cached_tokens, prompt_len - cached_tokens, self._ceilings)

    def tpot_s(self, prompt_len: int, out_len: int) -> float:
        """The mean over an answer's tokens after the first, alone, each at its own context."""
        contexts = range(prompt_len + 1, prompt_len + out_len)
        return sum(decode_floor_s(self._shape, context, self._ceilings) for context in contexts) / len(contexts)

    def gaps(self, streams: Iterable[Stream]) -> list[Gap]:
        return [
            Gap(late_s - early_s, self._clock_s[late] - self._clock_s[early], late)
            for stream in streams
            for (early_s, late_s), (early, late) in zip(pairwise(stream.times_s), pairwise(stream.steps), strict=True)
            if late != early
        ]


def gap_figures(prefix: str, gaps: Sequence[Gap], fractions: dict[str, float]) -> list[Figure]:
    """Percentiles of inter-token latency, each beside the same percentile on the floor clock; none where no gap is."""
    if not gaps:
        return []
    return [
        milliseconds(
            prefix.format(name),
            percentile((gap.seconds for gap in gaps), fraction),
            percentile((gap.floor_s for gap in gaps), fraction),
        )
        for name, fraction in fractions.items()
    ]
