"""How requests share the event loop with the streams: what takes milliseconds is done a piece at a time, and between
two pieces the loop looks after everything else that waits."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable


class Turnstile:
    """For small work without end, such as what hundreds of connections say at the same moment: lets one through each
    time the loop comes round, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_free = True

    def enter(self, work: Callable[[], None]) -> bool:
        """Whether it was done at once; else it will be."""
        if not self._is_free:
            self._waiting.append(work)
            return False
        self._is_free = False
        asyncio.get_running_loop().call_soon(self._next)
        work()
        return True

    def _next(self) -> None:
        if not self._waiting:
            self._is_free = True
            return
        work = self._waiting.popleft()
        asyncio.get_running_loop().call_soon(self._next)  # first: whatever comes of this one, the next has its turn
        work()


class Turns:
    """For pieces that take long, `async with` around each: one at a time, and after each as long a pause as it took. So
    the loop is never held up by two in a row, and half of its time is left to others."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._began_s = 0.0

    async def __aenter__(self) -> None:
        await self._lock.acquire()
        self._began_s = time.perf_counter()

    async def __aexit__(self, *_: object) -> None:
        took_s = time.perf_counter() - self._began_s
        asyncio.get_running_loop().call_later(took_s, self._lock.release)
