"""A lock that is given in the order it was asked for. With a plain one, the thread that steps the engine takes it again
at once, and every other stream stands still until that thread is done."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def try_acquire(self) -> bool:
        """Never waits, not even for another thread (or this one, interrupted) that is in the middle of a hand-over."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            free, self._held = not self._held, True
            return free
        finally:
            self._guard.release()

    def __enter__(self) -> None:
        turn = threading.Lock()
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until whoever holds the lock hands it over
        except BaseException:  # Ctrl-C while waiting: leave the line, or pass on what was just handed over
            with self._guard:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                    raise
            self.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()  # the lock stays held: it changes hands
            else:
                self._held = False
