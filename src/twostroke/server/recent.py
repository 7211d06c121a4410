"""What happened in the last minute: how many requests a second kept their promise, and how much of the time went into
prompts. Counts only; memory is bounded by the window."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from twostroke.core.step_record import StepTotals

WINDOW_S = 60.0
LEAST_SPAN_S = 1.0
"""A rate over less than this would say more of chance than of load."""


class Recent:
    def __init__(self, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._began_s = clock()
        self._kept: deque[tuple[int, Counter[str]]] = deque()
        """By second, how many requests of each class kept their promise."""
        self._levels: set[str] = set()
        """Classes that ever had one."""
        self._totals: deque[tuple[float, StepTotals]] = deque()
        """Sums over the engine's steps, as they were told."""

    def kept(self, level: str) -> None:
        """A request of this class ended and kept its promise."""
        second = int(self._clock())
        if not self._kept or self._kept[-1][0] != second:
            self._forget()
            self._kept.append((second, Counter()))
        self._kept[-1][1][level] += 1
        self._levels.add(level)

    def stood(self, totals: StepTotals | None) -> None:
        """Where the engine's sums stood just now; None: it has made no step yet."""
        now_s, totals = self._clock(), totals or StepTotals()
        if self._totals and totals.steps < self._totals[-1][1].steps:
            self._totals.clear()  # another engine, which counts from zero
        self._totals.append((now_s, totals))
        while len(self._totals) > 2 and self._totals[1][0] <= now_s - self._window_s:
            self._totals.popleft()

    def goodput(self) -> dict[str, float]:
        """Requests that kept their promise, a second, by class; 0 where one had some before the window."""
        self._forget()
        counts = Counter(dict.fromkeys(sorted(self._levels), 0))
        for _, by_level in self._kept:
            counts.update(by_level)
        span_s = max(LEAST_SPAN_S, min(self._window_s, self._clock() - self._began_s))
        return {level: count / span_s for level, count in counts.items()}

    def prefill_share(self) -> float | None:
        """Of the time, what went into reading prompts; None: too little was seen."""
        span_s, steps = self._steps()
        return steps.reading_s / span_s if span_s >= LEAST_SPAN_S else None

    def stream_step_s(self) -> float | None:
        """What a step without prompts took; None: there was none."""
        return self._steps()[1].stream_step_s

    def written_per_s(self) -> float:
        """Tokens that decode wrote, a second."""
        span_s, steps = self._steps()
        return steps.decode_tokens / span_s if span_s > 0.0 else 0.0

    def mean_context(self) -> float | None:
        """Tokens that a stream knew, over all steps; None: there was no stream."""
        return self._steps()[1].mean_context

    def _steps(self) -> tuple[float, StepTotals]:
        if not self._totals:
            return 0.0, StepTotals()
        (began_s, first), (ended_s, last) = self._totals[0], self._totals[-1]
        return ended_s - began_s, last.since(first)

    def _forget(self) -> None:
        oldest = self._clock() - self._window_s
        while self._kept and self._kept[0][0] < oldest:
            self._kept.popleft()
