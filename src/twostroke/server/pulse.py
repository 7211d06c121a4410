"""How long the event loop stays away: a beat that is due every few milliseconds while requests are being answered, and
how late it comes. One stretch of work on the loop is a gap in every stream there is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from twostroke.server.metrics import Metrics

BEAT_S = 0.01


class Pulse:
    def __init__(self, metrics: Metrics, is_wanted: Callable[[], bool]) -> None:
        self._metrics = metrics
        self._is_wanted = is_wanted
        self._is_beating = False

    def start(self) -> None:
        """May be called again; it ends by itself when nobody wants it."""
        if not self._is_beating:
            self._is_beating = True
            self._expect()

    def _expect(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s, self._worked_s = loop.time() + BEAT_S, time.thread_time()
        loop.call_at(self._due_s, self._beat, loop)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        late_s = max(0.0, loop.time() - self._due_s)
        # What the loop's own thread has worked meanwhile is its own fault; the rest was another thread's or program's.
        self._metrics.loop_lag.observe(late_s)
        self._metrics.loop_work.observe(min(late_s, time.thread_time() - self._worked_s))
        self._is_beating = self._is_wanted()
        if self._is_beating:
            self._expect()
