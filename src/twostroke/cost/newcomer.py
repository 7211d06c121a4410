"""What a request costs beside its steps when it comes to an idle engine: being taken in, waking what slept, handing
over its first token. A line over the length of the prompt, fitted to single requests. Knows nothing of engines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A request that came to an idle engine and stayed alone until its first token."""

    prompt_tokens: int
    ttft_s: float
    compute_s: float
    """Of the steps that read its prompt."""
    num_steps: int

    def beside_steps_s(self, host_s: float) -> float:
        """What of its TTFT is neither a step's nor the host's between steps; below 0 where clocks disagree."""
        return self.ttft_s - self.compute_s - self.num_steps * host_s


def fit_newcomers(seen: Sequence[Newcomer], host_s: float) -> tuple[float, float]:
    """Seconds, and seconds a prompt token; neither below 0. By medians, so that a few that something else held up do
    not count: the slope is that of pairs, each weighing as much as its lengths differ (Theil and Sen)."""
    points = [(one.prompt_tokens, one.beside_steps_s(host_s)) for one in seen]
    if not points:
        return 0.0, 0.0
    pairs = [(left, right) for left, right in combinations(sorted(points), 2) if left[0] != right[0]]
    slopes = [((right[1] - left[1]) / (right[0] - left[0]), right[0] - left[0]) for left, right in pairs]
    slope = max(0.0, _weighted_median(slopes)) if slopes else 0.0
    return max(0.0, statistics.median(seconds - slope * length for length, seconds in points)), slope


def _weighted_median(values: list[tuple[float, int]]) -> float:
    """The least value that half of the weight lies at or below."""
    half = sum(weight for _, weight in values) / 2
    for value, weight in sorted(values):
        half -= weight
        if half <= 0:
            return value
    raise ValueError("there is no median of nothing")
