"""How long answers are, as measured: the lengths of the latest ones, by class. From them, how many more tokens a stream
will write, which is far less than it may. Bounded memory; knows nothing of KV."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

REMEMBERED = 256
"""Answers a class."""
LEAST = 8
"""Answers before which nothing is said."""
BEYOND = 0.5
"""A stream that is longer than all that were measured writes as much again as this share of what it has."""


class _Lengths:
    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._ordered: list[int] = []
        self._sums: list[int] = []
        """Of the lengths from each place on; empty: to be made again."""

    def __len__(self) -> int:
        return len(self._ordered)

    def take(self, length: int) -> None:
        self._latest.append(length)
        insort(self._ordered, length)
        if len(self._latest) > REMEMBERED:
            oldest = self._latest.popleft()
            del self._ordered[bisect_right(self._ordered, oldest) - 1]
        self._sums = []

    def more_than(self, num_tokens: int) -> float:
        """The mean of what answers longer than this have beyond it."""
        place = bisect_right(self._ordered, num_tokens)
        number = len(self._ordered) - place
        if not number:
            return max(1.0, BEYOND * num_tokens)
        if not self._sums:
            self._sums = list(accumulate(reversed(self._ordered)))[::-1]
        return self._sums[place] / number - num_tokens


class OutputLengths:
    def __init__(self) -> None:
        self._by_level: dict[str, _Lengths] = {}

    def take(self, level: str, length: int) -> None:
        """An answer came to its own end. (One that was given up says nothing of how long answers are.)"""
        self._by_level.setdefault(level, _Lengths()).take(length)

    def knows(self, level: str) -> bool:
        """Whether enough answers of this class were measured."""
        known = self._by_level.get(level)
        return known is not None and len(known) >= LEAST

    def more(self, level: str, num_tokens: int, most: int) -> int | None:
        """Tokens that a stream of this class will still write behind its first `num_tokens`, and `most` at most. None:
        too few answers were measured."""
        known = self._by_level.get(level)
        if known is None or len(known) < LEAST:
            return None
        return max(0, min(most, round(known.more_than(num_tokens))))


def peak_growth(streams: list[tuple[int, int]]) -> int:
    """Tokens that KV grows by at most from now on, where of each stream is known what it will give back when it ends,
    and how many tokens it will write until then; all write at the same pace. It is greatest when one ends, just
    before."""
    ordered = sorted(streams, key=lambda stream: stream[1])
    given_back = peak = 0
    for place, (held, more) in enumerate(ordered):
        # All that end later have grown by as much as this one; those before have grown, and given everything back.
        peak = max(peak, (len(ordered) - place) * more - given_back)
        given_back += held
    return peak
