"""Ctrl-C at a safe moment: bookkeeping that must not be cut in half runs to its end first, and the interrupt follows at
once. Waiting for a device is not bookkeeping: it stays interruptible."""

from __future__ import annotations

# What `signal` is made of: that searches an enum for every handler, which takes it some ten times as long.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class HeldInterrupts:
    """Holds back SIGINT inside the `with` block, but for the stretch between `let_through` and `hold`. One change of
    handlers serves a whole step. Python gives signals to the main thread only, so others need nothing."""

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._is_holding = True
        self._held: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> HeldInterrupts:
        if threading.current_thread() is threading.main_thread():
            previous = _signal.getsignal(_signal.SIGINT)
            if callable(previous):
                self._previous = previous
                _signal.signal(_signal.SIGINT, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            _signal.signal(_signal.SIGINT, self._previous)
            self._deliver()

    def let_through(self) -> None:
        """Interrupts arrive from here on, one that was held back at once."""
        self._is_holding = False
        self._deliver()

    def hold(self) -> None:
        self._is_holding = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._held = (number, frame)
        if not self._is_holding:
            self._deliver()

    def _deliver(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._previous is not None:
            self._previous(*held)


def uninterrupted() -> HeldInterrupts:
    """For a `with` block that is bookkeeping from end to end."""
    return HeldInterrupts()
