"""How many threads a step should use. All of them, as long as the cores are ours. While other programs take a core or
more, steps of few rows are tried both ways, on all threads and on as many as cores are left, and the faster way is
kept for a while: threads that share a core with others hold each other up, but sometimes get more of it in all."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable

from twostroke import machine

logger = logging.getLogger("twostroke.cpu")

WINDOW_S = 0.2
"""The system counts in hundredths of a second: shorter ones say little."""
CROWDED, CLEAR = 0.4, 0.3
"""Of a core: with more than this taken, a thread has no core of its own; with less, it has one again."""
CLEAR_WINDOWS = 5
TRIAL_STEPS = 24
"""Steps of each way of a trial."""
KEPT_S = 2.0
"""How long the way that won is kept."""


class OthersOnCores:
    """What other programs, the system and a hypervisor take of the cores that this process may use."""

    def __init__(
        self,
        busy_s: Callable[[], float | None] | None = None,
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        affinity = getattr(os, "sched_getaffinity", None)
        allowed = frozenset(affinity(0)) if affinity is not None else None
        self.num_cores = len(allowed) if allowed is not None else os.cpu_count() or 1
        self._busy_s = busy_s or (lambda: machine.busy_s(allowed))
        self._own_s, self._clock = own_s, clock
        self._mark = (clock(), self._busy_s(), own_s())

    def cores_taken(self) -> float | None:
        """Since it last said so; None where that is less than a window ago, or where the system does not tell."""
        now_s = self._clock()
        elapsed_s = now_s - self._mark[0]
        if elapsed_s < WINDOW_S:
            return None
        _, busy_before_s, own_before_s = self._mark
        busy_s, own_s = self._busy_s(), self._own_s()
        self._mark = (now_s, busy_s, own_s)
        if busy_s is None or busy_before_s is None:
            return None
        return max(0.0, (busy_s - busy_before_s) - (own_s - own_before_s)) / elapsed_s


class ThreadCount:
    """Asked before a step, told after it."""

    def __init__(
        self, threads: int, others: OthersOnCores | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._most, self._others, self._clock = threads, others or OthersOnCores(), clock
        self._trial: _Trial | None = None
        self._clear_windows = 0
        self._has_said_so = False
        self.others_share = 0.0
        """Of the cores that this process may use, what went to others lately."""

    def for_step(self, is_short: bool) -> int:
        """`is_short`: of few rows, so that threads wait for each other often."""
        if self._most > 1:
            taken = self._others.cores_taken()
            if taken is not None:
                self._look(taken)
        return self._most if self._trial is None or not is_short else self._trial.threads

    def took(self, seconds: float, is_short: bool) -> None:
        if self._trial is not None and is_short:
            self._trial.took(seconds, self._clock())

    def _look(self, taken: float) -> None:
        cores = self._others.num_cores
        self.others_share = min(1.0, taken / cores)
        left = cores - taken
        if left < self._most - CROWDED:
            self._clear_windows = 0
            fewer = max(1, math.floor(left + CROWDED))
            if self._trial is None:
                self._trial = _Trial(self._most, fewer)
                self._say(taken)
            else:
                self._trial.fewer = min(fewer, self._trial.fewer)
        elif self._trial is not None and left > self._most - CLEAR:
            self._clear_windows += 1
            if self._clear_windows >= CLEAR_WINDOWS:
                self._trial, self._clear_windows = None, 0

    def _say(self, taken: float) -> None:
        level = logging.DEBUG if self._has_said_so else logging.INFO
        self._has_said_so = True
        logger.log(
            level,
            "other programs take %.1f of %d cores: decode may use fewer than %d threads until they are free",
            taken,
            self._others.num_cores,
            self._most,
        )


class _Trial:
    """Both ways in turn, and the faster one until it is time to try again."""

    def __init__(self, most: int, fewer: int) -> None:
        self._most, self.fewer = most, fewer
        self._sums_s: list[float] = []
        self._steps = 0
        self._kept: int | None = None
        self._kept_until_s = 0.0

    @property
    def threads(self) -> int:
        if self._kept is not None:
            return min(self._kept, self._most)
        return self.fewer if self._steps < TRIAL_STEPS else self._most

    def took(self, seconds: float, now_s: float) -> None:
        if self._kept is not None:
            if now_s >= self._kept_until_s:
                self._kept, self._steps, self._sums_s = None, 0, []
            return
        if self._steps % TRIAL_STEPS == 0:
            self._sums_s.append(0.0)
        self._sums_s[-1] += seconds
        self._steps += 1
        if self._steps == 2 * TRIAL_STEPS:
            fewer_s, most_s = self._sums_s
            self._kept = self.fewer if fewer_s <= most_s else self._most
            self._kept_until_s = now_s + KEPT_S
