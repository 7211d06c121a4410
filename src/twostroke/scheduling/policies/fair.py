"""Tenants share the engine by the seconds that they take, and of a tenant's requests the one that is due first goes
first. A tenant that floods waits behind itself alone: whatever it takes is put to its account, reading and writing, and
whoever took less goes before it. Each second counts by the weight of the class of the request that took it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from twostroke.core.sequence import Sequence
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevels
from twostroke.scheduling.forecast import Forecast
from twostroke.scheduling.policies.slack import Slack
from twostroke.scheduling.virtual_time import VirtualTime

AHEAD_S, AHEAD_SHARE, AHEAD_READING_SHARE = 1.0, 0.25, 0.125
"""A tenant that took so much more than another, while that one has work, leaves most of a step free: its streams take
only this part of its share, and its prompts only this part of what all decodes leave. Whoever comes next waits for the
steps in flight, and finds less that writes beside it."""


class Fair(Slack):
    name = "fair"

    def __init__(self, forecast: Forecast, priority_aging_s: float, levels: ServiceLevels) -> None:
        super().__init__(forecast, priority_aging_s, levels)
        self._time = VirtualTime()
        self._number: Counter[str] = Counter()  # unfinished sequences, by flow
        self._longest_s = 0.0
        """Of what was read in one piece since nobody had work."""

    def flow(self, sequence: Sequence) -> str:
        return sequence.request.tenant

    def in_turn(self, flows: Iterable[str]) -> Iterable[str]:
        return self._time.in_turn(flows, self._longest_s) if self._time.num_active > 1 else flows

    def share(self, flow: str) -> float:
        return self._time.share(flow) * (AHEAD_SHARE if self._is_ahead(flow) else 1.0)

    def step_share(self, sequence: Sequence) -> float:
        return AHEAD_READING_SHARE if self._is_ahead(self.flow(sequence)) else 1.0

    def _is_ahead(self, flow: str) -> bool:
        return self._time.num_active > 1 and self._time.lead_s(flow) > AHEAD_S

    def goes_before(self, one: Sequence, other: Sequence, now_s: float) -> bool:
        flow, other_flow = self.flow(one), self.flow(other)
        if flow == other_flow:
            return super().goes_before(one, other, now_s)
        return self._time.due(flow, self._longest_s) < self._time.due(other_flow, self._longest_s)

    @property
    def counts_writing(self) -> bool:
        return self._time.num_active > 1

    def enter(self, sequence: Sequence) -> None:
        flow = self.flow(sequence)
        self._number[flow] += 1
        self._time.begin(flow, self._weight(sequence))

    def leave(self, sequence: Sequence) -> None:
        flow = self.flow(sequence)
        self._number[flow] -= 1
        self._time.end(flow, self._weight(sequence))
        if not self._number[flow]:
            del self._number[flow]
            self._owed_s.pop(flow, None)
            self._passing.discard(flow)
        if not self._number:
            self._longest_s = 0.0

    def note_reading(self, sequence: Sequence, seconds: float, now_s: float) -> None:
        super().note_reading(sequence, seconds, now_s)
        self._longest_s = max(self._longest_s, seconds)
        self._time.charge(self.flow(sequence), seconds, self._weight(sequence))

    def note_writing(self, sequences: list[Sequence], seconds: float) -> None:
        slots = Counter((self.flow(sequence), self._weight(sequence)) for sequence in sequences)
        for (flow, weight), number in slots.items():
            self._time.charge(flow, seconds * number / len(sequences), weight)

    def _weight(self, sequence: Sequence) -> float:
        return self._weights[sequence.request.service_level or DEFAULT_LEVEL]
