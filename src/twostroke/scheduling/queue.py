"""Who goes first: an order of sequences that never changes while they live, and a list kept in that order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from twostroke.core.sequence import Sequence

MAX_PRIORITY = 100
"""Priorities beyond this count as this: no single request may be worth unbounded waiting of the others."""

Rank = tuple[float, int]


def rank_of(sequence: Sequence, priority_aging_s: float) -> Rank:
    """Lower goes first. All who wait age alike, so the order of two sequences is fixed when the later one arrives:
    a request can only be passed by those that arrive within (levels apart) x `priority_aging_s` after it. Those are
    finitely many, so none starves. Equal priorities keep the order of arrival."""
    priority = max(-MAX_PRIORITY, min(MAX_PRIORITY, sequence.request.priority))
    return (sequence.request.arrival_s + priority * priority_aging_s, sequence.seq_id)


class RankedQueue:
    """Sequences by rank, the first to go first."""

    def __init__(self, priority_aging_s: float) -> None:
        self._aging_s = priority_aging_s
        self._ranks: list[Rank] = []
        self._sequences: list[Sequence] = []
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """A snapshot: the queue may change while it is walked."""
        return iter(tuple(self._sequences))

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(tuple(self._sequences))

    def rank(self, sequence: Sequence) -> Rank:
        return rank_of(sequence, self._aging_s)

    def add(self, sequence: Sequence) -> int:
        """Returns how many go before it."""
        rank = self.rank(sequence)
        place = bisect_left(self._ranks, rank)
        self._ranks.insert(place, rank)
        self._sequences.insert(place, sequence)
        self.num_prompt_tokens += sequence.prompt_len
        return place

    def remove(self, sequence: Sequence) -> None:
        place = bisect_left(self._ranks, self.rank(sequence))
        if place == len(self._sequences) or self._sequences[place] is not sequence:
            raise ValueError(f"sequence {sequence.seq_id} is not in this queue")
        del self._ranks[place]
        del self._sequences[place]
        self.num_prompt_tokens -= sequence.prompt_len
