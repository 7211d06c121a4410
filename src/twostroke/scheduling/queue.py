"""Who goes first: the rank of a sequence by a moment and its priority, and a list kept in the order of ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from twostroke.core.sequence import Sequence

MAX_PRIORITY = 100
"""Priorities beyond this count as this: no single request may be worth unbounded waiting of the others."""

Rank = tuple[float, float, int, int]
"""Seconds; where those are equal, seconds of reading; then whoever was put behind another flow's (see `Admission`);
then the sequence's id."""

Item = TypeVar("Item", bound=Hashable)


def rank_from(sequence: Sequence, moment_s: float, priority_aging_s: float, reading_s: float = 0.0) -> Rank:
    """Lower goes first. `moment_s`: when it came, or is due. All who wait age alike, so the order of two sequences is
    fixed when the later one arrives: a request can only be passed by those that come within (levels apart) x
    `priority_aging_s` after it. Those are finitely many, so none starves. Equal ones keep the order they came in."""
    priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, sequence.request.priority))
    return (moment_s + priority * priority_aging_s, reading_s, 0, sequence.seq_id)


class RankedQueue(Generic[Item]):
    """Items by rank, the first to go first."""

    def __init__(self) -> None:
        self._ranks: list[Rank] = []
        self._items: list[Item] = []
        self._rank_of: dict[Item, Rank] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        return item in self._rank_of

    def __iter__(self) -> Iterator[Item]:
        """A snapshot: the queue may change while it is walked."""
        return iter(tuple(self._items))

    def walk(self) -> Iterator[Item]:
        """The same for whoever changes nothing meanwhile."""
        return iter(self._items)

    def __reversed__(self) -> Iterator[Item]:
        return reversed(tuple(self._items))

    def rank(self, item: Item) -> Rank:
        return self._rank_of[item]

    def first(self, fits: Callable[[Item], bool] | None = None) -> Item | None:
        """The first that fits; None: there is none."""
        return next((item for item in self._items if fits is None or fits(item)), None)

    def add(self, item: Item, rank: Rank) -> int:
        """Returns how many go before it."""
        place = bisect_left(self._ranks, rank)
        self._ranks.insert(place, rank)
        self._items.insert(place, item)
        self._rank_of[item] = rank
        return place

    def remove(self, item: Item) -> None:
        rank = self._rank_of.pop(item, None)
        if rank is None:
            raise ValueError(f"{item} is not in this queue")
        place = bisect_left(self._ranks, rank)
        del self._ranks[place]
        del self._items[place]
