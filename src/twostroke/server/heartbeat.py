"""Whether the engine's process still works: it beats into a pipe from a thread of its own, each beat saying how often
its loop came round and how long the steps in flight should take. A frozen process stops beating, a stuck one beats
without moving. Knows no engine, no socket and no HTTP."""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

BEAT_S = 0.5
TICK_S = 0.25
PATIENCE = 10.0
"""Steps may take this many times what was predicted, on top of the time-out: predictions err, cores are shared."""
STUCK_FACTOR = 3.0
"""Time-outs for a loop that stands still while its process beats: it may compile a kernel."""
LOADING_FACTOR = 20.0
"""Time-outs for a process that loads its model and does not beat: a slow disk holds everything up."""
_RECORD = struct.Struct("<BQd")
_READ_BYTES = 64 * 1024


class Doing(IntEnum):
    LOADING = 0
    WAITING = 1
    STEPPING = 2


class Heart:
    """In the engine's process. The loop sets `doing`, counts `moves` and tells of steps; the thread does the rest."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)  # a watcher that does not read never holds the engine up
        self.doing = Doing.LOADING
        self.moves = 0
        self._predicted_s = (0.0, 0.0)
        """Of the two steps that were launched last; no more are in flight."""
        self._told_s = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._beat_on, name="heart", daemon=True).start()

    def launching(self, predicted_s: float) -> None:
        """Just before a step. A long one is told at once: it may keep this process from beating while it lasts."""
        self._predicted_s = self._predicted_s[1], predicted_s
        if predicted_s > BEAT_S and sum(self._predicted_s) > self._told_s:
            self.beat()

    def beat(self) -> None:
        # Nobody may read just now, or ever again: then standard input closes, too.
        with self._lock, suppress(OSError):  # else an older record could follow a newer one
            self._told_s = sum(self._predicted_s)
            record = _RECORD.pack(self.doing, self.moves, self._told_s)
            os.write(self._descriptor, record)  # shorter than what a pipe may tear apart

    def _beat_on(self) -> None:
        while True:
            self.beat()
            time.sleep(BEAT_S)


class HeartWatch:
    """In the API's process: how long nothing was heard, and for how long the loop has not moved. Only time in which
    this process ran itself counts, so that a machine that slept does not wake up to a verdict."""

    def __init__(self, descriptor: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked_s = clock()
        self._rest = b""
        self._moves = -1
        self._doing = Doing.LOADING
        self._predicted_s = 0.0
        self.silent_s = 0.0
        self.still_s = 0.0

    async def hung(self) -> str:
        """Returns when the process must be given up, with the reason in words."""
        while (reason := self.look()) is None:
            await asyncio.sleep(TICK_S)
        return reason

    def look(self) -> str | None:
        """To be called again and again; None: all is well, or may be yet."""
        now_s = self._clock()
        ran_s = min(now_s - self._looked_s, 2 * TICK_S)  # more than that is time in which this process did not run
        self._looked_s = now_s
        self.silent_s += ran_s
        self.still_s += ran_s
        self._listen()
        return self._verdict()

    @property
    def is_doubtful(self) -> bool:
        """Whether half of the patience is used up: then nobody should be sent here."""
        silent_limit_s, still_limit_s = self._limits_s()
        return self.silent_s > silent_limit_s / 2 or self.still_s > still_limit_s / 2

    def close(self) -> None:
        os.close(self._descriptor)

    def _listen(self) -> None:
        with suppress(OSError):
            while data := os.read(self._descriptor, _READ_BYTES):
                self._rest += data
        whole = len(self._rest) // _RECORD.size * _RECORD.size
        for doing, moves, predicted_s in _RECORD.iter_unpack(self._rest[:whole]):
            self.silent_s = 0.0
            self._predicted_s = predicted_s
            if moves != self._moves or doing != self._doing:
                self._moves, self._doing, self.still_s = moves, Doing(doing), 0.0
        self._rest = self._rest[whole:]

    def _limits_s(self) -> tuple[float, float]:
        """How long it may be silent, and how long its loop may stand still."""
        if self._doing is Doing.LOADING:
            return LOADING_FACTOR * self._timeout_s, float("inf")  # a large model may take long, and says so by beating
        patience_s = PATIENCE * self._predicted_s
        return self._timeout_s + patience_s, STUCK_FACTOR * self._timeout_s + patience_s

    def _verdict(self) -> str | None:
        silent_limit_s, still_limit_s = self._limits_s()
        if self.silent_s <= silent_limit_s and self.still_s <= still_limit_s:
            return None
        if self.silent_s > silent_limit_s:
            what = f"it gave no sign of life for {self.silent_s:.1f} s"
        else:
            what = f"its loop has not moved for {self.still_s:.1f} s"
        return f"{what}; {self._last_known()}"

    def _last_known(self) -> str:
        if self._doing is Doing.LOADING:
            return "when last heard it loaded the model"
        if self._doing is Doing.WAITING:
            return "when last heard it had nothing to do"
        return f"when last heard it was at steps that should take {self._predicted_s:.3g} s"
