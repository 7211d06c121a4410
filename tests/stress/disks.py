"""A disk that is slow, full, damaged or shared, in turns of the engine in place of seconds: what the disk tier's
threads would do is queued, and done when whoever plays says so. The files are real."""

from __future__ import annotations

import errno
import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from twostroke.kv.tiers import disk as disk_module
from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.files import KEY_NAME, SUFFIX
from twostroke.kv.tiers.tiers import KVTiers

TURN_S = 0.1
"""What a turn counts for, where the tier waits by a clock."""


class DiskTrouble(Enum):
    FULL = "no write succeeds from now on; the next leaves half of its bytes"
    BACK = "writes succeed again"
    FLIP = "a bit is flipped, in any file"
    CUT = "a file ends at any byte"
    REMOVE = "a file is removed"
    RUBBISH = "a file of rubbish appears"
    NEW_KEY = "the key is gone"


class QueuedFuture(Future):  # type: ignore[type-arg]
    """Who waits for it has the queue done up to it."""

    def __init__(self, threads: QueuedThreads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> Any:
        while not self.done() and self._threads.run(1):
            pass
        return super().result(timeout)


class QueuedThreads:
    """In place of an executor."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[QueuedFuture, Callable[..., Any], tuple[Any, ...]]] = deque()

    def submit(self, job: Callable[..., Any], *arguments: Any) -> QueuedFuture:
        future = QueuedFuture(self)
        self._jobs.append((future, job, arguments))
        return future

    def run(self, most: int) -> int:
        """Do so many; returns how many there were."""
        for done in range(most):
            if not self._jobs:
                return done
            future, job, arguments = self._jobs.popleft()
            try:
                future.set_result(job(*arguments))
            except Exception as error:
                future.set_exception(error)
        return most

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if not cancel_futures:
            self.run(len(self._jobs))
        self._jobs.clear()


class SlowDisk:
    """Reads and writes of one engine's disk tier, done in turns."""

    def __init__(self, tiers: KVTiers, seed: int) -> None:
        threads = tiers._threads
        assert threads is not None
        threads._readers.shutdown()
        threads._writer.shutdown()
        self._readers, self._writer = QueuedThreads(), QueuedThreads()
        threads._readers, threads._writer = self._readers, self._writer  # type: ignore[assignment]
        threads.wait = lambda timeout_s: self.turn(at_least=1)  # type: ignore[method-assign]
        self._random = random.Random(seed)
        self._num_turns = 0
        threads.clock = lambda: self._num_turns * TURN_S

    def finish(self) -> None:
        """All that is queued."""
        while self._readers.run(64) + self._writer.run(64):
            pass

    def turn(self, at_least: int = 0) -> None:
        self._num_turns += 1
        for queue in (self._readers, self._writer):
            queue.run(max(at_least, self._random.choice([0, 0, 1, 4])))


class Folder:
    """The folder that engines share, and what befalls it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.is_full = False
        self._random = random.Random(seed)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While this holds, writes of disk tiers go through here."""
        real = disk_module.write_all

        def write_all(descriptor: int, parts: list[memoryview], offset: int) -> None:
            if self.is_full:
                half = b"".join(parts)
                real(descriptor, [memoryview(half[: len(half) // 2])], offset)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(descriptor, parts, offset)

        disk_module.write_all = write_all
        try:
            yield
        finally:
            disk_module.write_all = real

    def befall(self, trouble: DiskTrouble, disk: DiskTier | None) -> None:
        if trouble in (DiskTrouble.FULL, DiskTrouble.BACK):
            self.is_full = trouble is DiskTrouble.FULL
            if disk is not None and not self.is_full:
                disk._paused_until_s = 0.0  # its pause is over
            return
        if trouble is DiskTrouble.RUBBISH:
            path = self.path / f"{self._random.getrandbits(40)}{SUFFIX}"
            path.write_bytes(self._random.randbytes(self._random.choice([0, 10, 500])))
            return
        if trouble is DiskTrouble.NEW_KEY:
            (self.path / KEY_NAME).unlink(missing_ok=True)
            return
        files = sorted(path for path in self.path.iterdir() if path.name.endswith(SUFFIX) and path.stat().st_size)
        if not files:
            return
        path = self._random.choice(files)
        place = self._random.randrange(path.stat().st_size)
        if trouble is DiskTrouble.REMOVE:
            path.unlink()
        elif trouble is DiskTrouble.CUT:
            os.truncate(path, place)
        else:
            content = bytearray(path.read_bytes())
            content[place] ^= 1 << self._random.randrange(8)
            with path.open("r+b") as file:
                file.write(content)
