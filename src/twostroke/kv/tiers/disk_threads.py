"""The threads between host memory and disk: two that read, since one checks while the other waits for the disk, and one
that writes when the machine has nothing better to do. What is done is collected by whoever asks; nobody is called."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from twostroke.kv.tiers.disk import DiskTier
from twostroke.kv.tiers.files import Found, OpenFiles
from twostroke.kv.tiers.host import Kept

View = Callable[[int, int], memoryview]
"""The bytes of a host slot, by group and slot."""
READERS = 2
READ_AHEAD = 8
"""Blocks that the system is told of before a reader gets to them."""
LOWEST_PRIORITY = 19
LOOK_EVERY_S = 0.5
"""The most often that the folder is looked at for what other processes wrote."""
LOOK_WAIT_S = 0.25
"""The longest that a sequence waits for that: a folder may lie on a slow network."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The blocks of one sequence that come from disk."""

    seq_id: int
    blocks: tuple[tuple[Kept, Found], ...]
    arrived: list[bool]
    left: int
    began_s: float = field(default_factory=time.perf_counter)
    took_s: float = 0.0
    is_settled: bool = False
    """The scheduler's thread knows of it."""

    @property
    def is_over(self) -> bool:
        return self.is_settled

    @property
    def arrived_bytes(self) -> int:
        found = zip(self.blocks, self.arrived, strict=True)
        return sum(block.record.payload_bytes for (_, block), arrived in found if arrived)


@dataclass(slots=True, eq=False)
class Look:
    """At what other processes have written, for sequences that wait until it is over, or for a moment."""

    until_s: float
    clock: Callable[[], float]
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_done or self.clock() > self.until_s


class DiskThreads:
    def __init__(self, disk: DiskTier, view: View) -> None:
        self._disk, self._view = disk, view
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-write", initializer=_give_way)
        self._fetched: deque[Fetch] = deque()
        self._written: deque[tuple[Kept, bool]] = deque()
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._generation = 0
        self.clock: Callable[[], float] = time.monotonic
        """Of looks at the folder."""
        self._look: Look | None = None
        self._next_look_s = -math.inf
        if not disk.is_scanned:
            self._writer.submit(disk.scan)

    def look(self) -> Look | None:
        """Have the folder looked at, or be told of the look that goes on; None: one is over since a moment ago."""
        if self._look is not None and not self._look.is_over:
            return self._look
        if (now_s := self.clock()) < self._next_look_s:
            return None
        self._look = look = Look(now_s + LOOK_WAIT_S, self.clock)
        self._next_look_s = now_s + LOOK_EVERY_S
        self._readers.submit(self._look_at_folder, look)
        return look

    def _look_at_folder(self, look: Look) -> None:
        with contextlib.suppress(Exception):  # what is not found is computed
            self._disk.look()
        look.is_done = True
        self._news.set()

    def fetch(self, seq_id: int, blocks: Sequence[tuple[Kept, Found]]) -> Fetch:
        """Fill these pinned slots; `fetched` has it when all were tried."""
        fetch = Fetch(seq_id, tuple(blocks), [False] * len(blocks), len(blocks))
        order = sorted(range(len(blocks)), key=lambda place: _where(blocks[place][1]))
        for first in range(READERS):  # in turn, in the order they lie in: each waits while the other checks
            self._readers.submit(self._read, fetch, order[first::READERS])
        return fetch

    def _read(self, fetch: Fetch, places: list[int]) -> None:
        with OpenFiles() as files:
            for number, place in enumerate(places):
                for ahead in places[number + (READ_AHEAD if number else 0) : number + READ_AHEAD + 1]:
                    files.expect(fetch.blocks[ahead][1])
                kept, found = fetch.blocks[place]
                arrived = False
                with contextlib.suppress(Exception):  # whatever it is, the block is not there
                    arrived = self._disk.read(found, kept.node, self._view(kept.group, kept.slot), files)
                fetch.arrived[place] = arrived
        with self._lock:
            fetch.left -= len(places)
            if fetch.left or not places:
                return
        for found in {found.segment.path: found for _, found in fetch.blocks}.values():
            self._disk.used(found)
        fetch.took_s = time.perf_counter() - fetch.began_s
        self._fetched.append(fetch)
        self._news.set()

    def write(self, kept: Kept) -> None:
        """Write a pinned slot when there is time; `written` has it then."""
        self._writer.submit(self._write, kept, self._generation)

    def _write(self, kept: Kept, generation: int) -> None:
        done = False
        if generation == self._generation:  # else all was to be forgotten
            with contextlib.suppress(Exception):
                done = not kept.is_lost and self._disk.write(kept.node, kept.group, self._view(kept.group, kept.slot))
        if kept.is_lost:  # before, or meanwhile
            self._disk.forget(kept.node, kept.group)
        self._written.append((kept, done))
        self._news.set()

    def fetched(self) -> list[Fetch]:
        return _drained(self._fetched)

    def written(self) -> list[tuple[Kept, bool]]:
        return _drained(self._written)

    def wait(self, timeout_s: float) -> None:
        """Until something was fetched or written."""
        if self._news.wait(timeout_s):
            self._news.clear()

    def clear(self) -> None:
        """Remove what is on disk, and what is on its way there. The scheduler waits for it: not for a look at all that
        a folder holds, by a thread that gives way to everybody."""
        self._generation += 1
        self._disk.stop_reading()
        self._writer.submit(self._disk.clear).result()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was to be written is; False: it takes longer."""
        with contextlib.suppress(TimeoutError):
            self._writer.submit(lambda: None).result(timeout_s)
            return True
        return False

    def close(self) -> None:
        self._disk.stop_reading()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._disk.close()


def _where(found: Found) -> tuple[str, int]:
    return str(found.segment.path), found.record.offset


def _drained(queue: deque[Fetch] | deque[tuple[Kept, bool]]) -> list:  # type: ignore[type-arg]
    done = []
    while queue:
        done.append(queue.popleft())
    return done


def _give_way() -> None:
    """Linux has a priority for each thread: decode comes first."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
