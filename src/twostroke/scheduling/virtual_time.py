"""Shares of an engine by weighted virtual time, over seconds: a flow's time is what it was given, divided by its
weight, and whoever is furthest behind goes next. Weights are those of pieces of work: what a flow is given is divided
by the weight of what it was given for. Knows names and seconds; knows nothing of requests.

While a flow has work to be chosen, it gets no less than its share of what is chosen, but for one piece. Let X have work
from a moment on, and let no piece be longer than `piece_s`. Another one is chosen only if its time and a piece, over
its weight, are no more than X's. So no other's time is ever beyond X's time and a piece over X's weight. Summed over
all, by weight: X was given its share of the whole, less a piece at most (`tests/scheduling/test_virtual_time.py`, and
with a real scheduler `tests/scheduling/test_shares_of_tenants.py`). Of a flow with work of several weights the lightest
counts there, so that no piece is put to its account for more than was expected.
A step may be cut short for the sake of its streams. Then a piece is shorter, and the few tokens of a prompt that always
move are a piece like any other: the bound has no term for them. A step that has no room for whoever is next ends there,
so nobody goes before it. Whoever waits for streams to end has no work to be chosen meanwhile.
What is forgotten (`_move_on`) does not change that: a gap is never made smaller than CREDIT_S over the weight of anyone
behind it, and a piece is shorter than CREDIT_S.

A flow that has nothing to do lends its share to the others, and may have up to CREDIT_S of that back when it returns:
who asks little and seldom goes before who asks without end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf

CREDIT_S = 10.0
MOST_IDLE = 4096
"""Flows without work that are remembered. Whoever is forgotten has no debts, and no more than the credit."""


class VirtualTime:
    def __init__(self) -> None:
        self._time_s: dict[str, float] = {}  # of each that has work, and of some that had
        self._work: dict[str, Counter[float]] = {}  # of those that have any: pieces of work by weight
        self._weight: dict[str, float] = {}  # the lightest of it
        self._mean_weight: dict[str, float] = {}
        self._now_s = 0.0
        """The least of those that have work, when one last began or ended; it never goes back."""

    @property
    def num_active(self) -> int:
        return len(self._weight)

    def begin(self, flow: str, weight: float = 1.0) -> None:
        """It has one more piece of work, of this weight."""
        if flow not in self._weight:
            self._move_on()
            self._time_s[flow] = max(self._time_s.get(flow, 0.0), self._now_s - CREDIT_S / weight)
            self._work[flow] = Counter()
        self._work[flow][weight] += 1
        self._weigh(flow)

    def end(self, flow: str, weight: float = 1.0) -> None:
        """A piece of its work is over."""
        work = self._work[flow]
        work[weight] -= 1
        if not work[weight]:
            del work[weight]
        if work:
            self._weigh(flow)
            return
        self._move_on()
        del self._work[flow], self._weight[flow], self._mean_weight[flow]
        if len(self._time_s) - len(self._weight) > MOST_IDLE:
            for name in [name for name in self._time_s if name not in self._weight][: MOST_IDLE // 2]:
                del self._time_s[name]

    def _weigh(self, flow: str) -> None:
        work = self._work[flow]
        self._weight[flow] = min(work)
        self._mean_weight[flow] = sum(weight * number for weight, number in work.items()) / work.total()

    def charge(self, flow: str, seconds: float, weight: float = 1.0) -> None:
        """It was given these, for work of this weight."""
        if flow in self._time_s:  # else it has ended, and was forgotten meanwhile
            self._time_s[flow] += seconds / weight

    def in_turn(self, flows: Iterable[str], piece_s: float = 0.0) -> list[str]:
        """Whoever is to be given a piece first."""
        return sorted(flows, key=lambda flow: self.due(flow, piece_s))

    def due(self, flow: str, piece_s: float = 0.0) -> float:
        """Its time once it was given a piece, of the lightest of its work: the least goes next."""
        return self._time_s[flow] + piece_s / self._weight[flow]

    def share(self, flow: str) -> float:
        """Among those that have work, each by the mean weight of what it has."""
        return self._mean_weight[flow] / sum(self._mean_weight.values()) if len(self._work) > 1 else 1.0

    def lead_s(self, flow: str) -> float:
        """How far it is before the one that is furthest behind. What a newcomer has lent is no lead of the others."""
        return self._time_s[flow] - max(self._now_s, min(self._time_s[other] for other in self._weight))

    def _move_on(self) -> None:
        """Nobody is held to more than the credit: what a flow took while others wanted little is forgotten. That puts
        none before another: where a gap is wider than the credit of those behind it, all beyond it move by as much."""
        if not self._weight:
            return
        in_order = sorted(self._weight, key=self._time_s.__getitem__)
        self._now_s = before_s = max(self._now_s, self._time_s[in_order[0]])
        lightest, forgotten_s = inf, 0.0
        for flow in in_order:
            time_s = self._time_s[flow]
            forgotten_s += max(0.0, time_s - before_s - CREDIT_S / lightest)
            self._time_s[flow] = time_s - forgotten_s
            before_s, lightest = max(before_s, time_s), min(lightest, self._weight[flow])
