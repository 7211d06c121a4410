"""Whatever is due first goes first, whoever sent it. A request is due when its class promised the first token. Who has
no slack left, because reading alone takes longer than until then, is lost, and yields to those that can still be met.

The order is that of deadlines, not of slack itself: slack shrinks while one waits and stands still while it is read, so
two long prompts would take turns until both are late. Slack decides who is lost, which is what it is good for.

Nobody starves. A deadline does not change, and those that come later are due later, so only finitely many go before
one that waits. The lost are read in the same order, and as long as any of them waits, LOST_SHARE of all reading is
theirs: whoever is lost is read after at most the lost work before it, divided by that share."""

from __future__ import annotations

from math import floor, inf

from twostroke.core.sequence import Sequence
from twostroke.core.service_level import ServiceLevels
from twostroke.scheduling.forecast import Forecast
from twostroke.scheduling.policies.policy import Policy
from twostroke.scheduling.queue import Rank, rank_from

LOST_SHARE = 0.2
"""Of the seconds of reading, while somebody lost waits."""
EQUALS = 0.05
"""Requests of a class that came within this share of its promise are equals: the shortest goes first. All of them
together take as long in any order, so the last is no later for it, and the mean is earlier."""
UNPROMISED_S = 60.0
"""Whoever was promised nothing is due so long after it came: it goes behind those that were, and not forever."""


class Slack(Policy):
    name = "slack"

    def __init__(self, forecast: Forecast, priority_aging_s: float, levels: ServiceLevels) -> None:
        super().__init__(forecast, priority_aging_s, levels)
        self._owed_s: dict[str, float] = {}
        """By flow: what the lost have coming, and not more than a piece that they had beforehand."""
        self._passing: set[str] = set()
        """Flows in which somebody lost waits for what is read next."""

    def rank(self, sequence: Sequence, since_s: float = -inf) -> Rank:
        since_s = max(sequence.request.asked_s, since_s)
        promise = sequence.timing.promise
        if promise is None or promise.ttft_s is None:
            return rank_from(sequence, since_s + UNPROMISED_S, self._aging_s)
        width_s = EQUALS * promise.ttft_s
        due_s = floor(since_s / width_s) * width_s + promise.ttft_s
        return rank_from(sequence, due_s, self._aging_s, self._forecast.reading_s(sequence))

    def lost_s(self, sequence: Sequence) -> float:
        promise = sequence.timing.promise
        if promise is None or promise.ttft_s is None or sequence.num_output:
            return inf
        return self._forecast.last_start_s(sequence, sequence.request.asked_s + promise.ttft_s)

    def goes_before(self, one: Sequence, other: Sequence, now_s: float) -> bool:
        one_lost, other_lost = self.lost_s(one) < now_s, self.lost_s(other) < now_s
        if one_lost == other_lost:
            return self.rank(one)[0] < self.rank(other)[0]
        flow = self.flow(other)
        if not self.reads_lost(flow):
            self.note_passed(flow)
            return other_lost
        return one_lost

    def reads_lost(self, flow: str) -> bool:
        return self._owed_s.get(flow, 0.0) > 0.0

    def note_passed(self, flow: str) -> None:
        self._passing.add(flow)

    def note_reading(self, sequence: Sequence, seconds: float, now_s: float) -> None:
        flow = self.flow(sequence)
        if self.lost_s(sequence) < now_s:
            self._owed_s[flow] = max(-seconds, self._owed_s.get(flow, 0.0) - seconds)
        elif flow in self._passing:
            self._owed_s[flow] = self._owed_s.get(flow, 0.0) + seconds * LOST_SHARE / (1.0 - LOST_SHARE)
            self._passing.discard(flow)
