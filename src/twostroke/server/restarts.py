"""When an engine that ended is started again, later each time, and how long callers should wait until then."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

FIRST_BACK_OFF_S = 0.5
LONGEST_BACK_OFF_S = 30.0
STEADY_AFTER_S = 60.0
"""An engine that ran this long starts the back-off anew."""
GUESSED_START_S = 1.0
"""What a start takes, before one was seen."""


class Restarts:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._back_off_s = FIRST_BACK_OFF_S
        self._started_s = clock()
        self._start_takes_s = GUESSED_START_S
        self.by_reason: Counter[str] = Counter(died=0, hung=0)

    def starting(self) -> None:
        self._started_s = self._clock()

    def ready(self) -> None:
        self._start_takes_s = self._clock() - self._started_s

    def ended(self, *, is_hung: bool) -> float:
        """Seconds until the next start."""
        now_s = self._clock()
        if now_s - self._started_s > STEADY_AFTER_S:
            self._back_off_s = FIRST_BACK_OFF_S
        back_off_s, self._back_off_s = self._back_off_s, min(self._back_off_s * 2, LONGEST_BACK_OFF_S)
        self._started_s = now_s + back_off_s
        self.by_reason["hung" if is_hung else "died"] += 1
        return back_off_s

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until an engine that is being started should be ready, as far as one can tell."""
        return max(1, math.ceil(self._started_s + self._start_takes_s - self._clock()))
