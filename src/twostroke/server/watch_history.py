"""The latest events as they are sent, in a ring that is bounded in bytes and in age. All viewers read from it, each at
its own place, so one that is slow costs nothing more. Knows no viewer and no engine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MAX_BYTES = 4 * 2**20
MAP_SHARE = 4
"""Of these bytes, maps of KV blocks may take one in this many: they are large, and a step says more than a map."""
MAX_AGE_S = 180.0
PIECE_BYTES = 64 * 1024


class Kept(NamedTuple):
    kept_s: float
    payload: bytes


class History:
    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        max_age_s: float = MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._events: deque[Kept] = deque()
        self._first = 0
        self._maps: deque[int] = deque()
        """Numbers of the maps that are kept."""
        self.num_bytes = self.num_map_bytes = 0

    @property
    def first(self) -> int:
        """The number of the oldest event that is kept. Numbers run on, whatever is dropped."""
        return self._first

    @property
    def end(self) -> int:
        """The number that the next event gets."""
        return self._first + len(self._events)

    def add(self, payload: bytes, *, is_map: bool = False) -> None:
        """One that is too large for the ring has a number, and is not kept: it would drive out all the others."""
        now_s = self._clock()
        self._events.append(Kept(now_s, b""))
        if len(payload) <= self._max_bytes // (MAP_SHARE if is_map else 1):
            self._events[-1] = Kept(now_s, payload)
            self.num_bytes += len(payload)
            if is_map:
                self._maps.append(self.end - 1)
                self.num_map_bytes += len(payload)
        while self.num_map_bytes > self._max_bytes // MAP_SHARE:
            self._empty(self._maps[0])
        while self._events and (self.num_bytes > self._max_bytes or now_s - self._events[0].kept_s > self._max_age_s):
            self._empty(self._first)
            self._events.popleft()
            self._first += 1

    def _empty(self, number: int) -> None:
        """The event is dropped; its number stays."""
        kept = self._events[number - self._first]
        self._events[number - self._first] = Kept(kept.kept_s, b"")
        self.num_bytes -= len(kept.payload)
        if self._maps and self._maps[0] == number:
            self._maps.popleft()
            self.num_map_bytes -= len(kept.payload)

    def clear(self) -> None:
        """Numbers run on."""
        self._first, self.num_bytes, self.num_map_bytes = self.end, 0, 0
        self._events.clear()
        self._maps.clear()

    def piece(self, number: int) -> tuple[bytes, int]:
        """Some events from this number on, about PIECE_BYTES of them, and the number that follows them."""
        index, size, pieces = max(0, number - self._first), 0, []
        while index < len(self._events) and size < PIECE_BYTES:
            pieces.append(self._events[index].payload)
            size += len(pieces[-1])
            index += 1
        return b"".join(pieces), self._first + index
