"""How far a drafter's word can be taken: what share of the drafts that it expects to hold do hold, learnt for each
stream from its own and, until there are enough, from all streams'. Old experience fades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FADES = 0.9
"""Of a stream's experience, what is left of it after the next trial."""
RESTS = 0.99
"""The same after a step in which none of its drafts was worth a trial: in time it is tried again."""
SHARED_FADES = 0.99
PRIOR_WEIGHT = 2.0
"""Drafts' worth of experience that a stream begins with: what all streams know. What they know begins with as many in
which the drafter was right about itself."""
NUM_POSITIONS = 16


@dataclass(slots=True)
class Experience:
    expected: float = 0.0
    """Drafts that should have held, by the drafter's own word."""
    held: float = 0.0

    def add(self, expected: float, held: float, fades: float) -> None:
        self.expected = self.expected * fades + expected
        self.held = self.held * fades + held

    def rest(self, share: float) -> None:
        self.expected *= share
        self.held *= share

    def scale(self, prior: float) -> float:
        """By what the drafter's word is to be multiplied."""
        return (self.held + PRIOR_WEIGHT * prior) / (self.expected + PRIOR_WEIGHT)


@dataclass(slots=True)
class Acceptance:
    """Of one drafter."""

    _all: Experience = field(default_factory=Experience)
    _positions: list[Experience] = field(default_factory=lambda: [Experience() for _ in range(NUM_POSITIONS)])
    _streams: dict[int, Experience] = field(default_factory=dict)

    def open(self, seq_id: int) -> None:
        self._streams.setdefault(seq_id, Experience())

    def close(self, seq_id: int) -> None:
        self._streams.pop(seq_id, None)

    def survivals(self, seq_id: int, chances: Sequence[float]) -> list[float]:
        """Of each draft, the chance that it and all before it hold."""
        shared = self._all.scale(1.0)
        stream = self._streams[seq_id].scale(shared)
        found, survival = [], 1.0
        for index, chance in enumerate(chances):
            # What this position is worth beside the average one, for all streams.
            place = self._positions[min(index, NUM_POSITIONS - 1)].scale(shared) / shared if shared > 0 else 1.0
            survival *= min(0.995, max(0.0, chance * stream * place))
            found.append(survival)
        return found

    def learn(self, seq_id: int, chances: Sequence[float], num_held: int) -> None:
        """These were computed, and the first `num_held` held. Of those behind the first that did not, nothing is
        known."""
        tried = chances[: num_held + 1]
        for index, chance in enumerate(tried):
            self._positions[min(index, NUM_POSITIONS - 1)].add(chance, float(index < num_held), SHARED_FADES)
        expected = sum(tried)
        self._all.add(expected, num_held, SHARED_FADES)
        if seq_id in self._streams:
            self._streams[seq_id].add(expected, num_held, FADES)

    def rest(self, seq_id: int) -> None:
        """Its drafts were not worth computing, or there were none."""
        self._streams[seq_id].rest(RESTS)
