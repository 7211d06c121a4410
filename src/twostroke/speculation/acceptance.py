"""How far a drafter's word can be taken: what share of the drafts that it expects to hold do hold, learnt for each
stream from its own and, until there are enough, from all streams'; and how often drafts hold at each position, for
whoever must know before there are any. Old experience fades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FADES = 0.9
"""Of a stream's experience, what is left of it after the next trial."""
SHARED_FADES = 0.99
PRIOR_WEIGHT = 2.0
"""Drafts' worth of experience that a stream begins with: what all streams know. What they know begins with as many in
which the drafter was right about itself."""
NUM_POSITIONS = 16
FIRST_RATE = 0.6
"""The share of drafts that hold, of a drafter that says nothing of itself and was never tried."""
SUREST = 0.995


@dataclass(slots=True)
class Experience:
    tried: float = 0.0
    expected: float = 0.0
    """Drafts that should have held, by the drafter's own word."""
    held: float = 0.0

    def add(self, tried: float, expected: float, held: float, fades: float) -> None:
        self.tried = self.tried * fades + tried
        self.expected = self.expected * fades + expected
        self.held = self.held * fades + held

    def scale(self, prior: float) -> float:
        """By what the drafter's word is to be multiplied."""
        return (self.held + PRIOR_WEIGHT * prior) / (self.expected + PRIOR_WEIGHT)

    def rate(self, prior: float) -> float:
        """The share that held."""
        return (self.held + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


@dataclass(slots=True)
class Acceptance:
    """Of one drafter."""

    first_rate: float = FIRST_RATE
    _all: Experience = field(default_factory=Experience)
    _positions: list[Experience] = field(default_factory=lambda: [Experience() for _ in range(NUM_POSITIONS)])
    _streams: dict[int, Experience] = field(default_factory=dict)

    def open(self, seq_id: int) -> None:
        self._streams.setdefault(seq_id, Experience())

    def close(self, seq_id: int) -> None:
        self._streams.pop(seq_id, None)

    def survivals(self, seq_id: int, chances: Sequence[float]) -> list[float]:
        """Of each draft, the chance that it and all before it hold."""
        if not chances:
            return []
        shared = self._all.scale(1.0)
        stream = self._streams[seq_id].scale(shared)
        found, survival = [], 1.0
        for chance, position in zip(chances, self._places(len(chances)), strict=True):
            # What this position is worth beside the average one, for all streams.
            place = position.scale(shared) / shared if shared > 0 else 1.0
            survival *= min(SUREST, chance * stream * place)
            found.append(survival)
        return found

    def usual_survivals(self, seq_id: int, count: int) -> list[float]:
        """The same of drafts that are not made yet."""
        if not count:
            return []
        everybody = self._all.rate(self.first_rate)
        stream = self._streams[seq_id].rate(everybody) / everybody if everybody > 0 else 0.0
        found, survival = [], 1.0
        for position in self._places(count):
            survival *= min(SUREST, position.rate(everybody) * stream)
            found.append(survival)
        return found

    def _places(self, count: int) -> list[Experience]:
        positions = self._positions
        return positions[:count] + positions[-1:] * (count - NUM_POSITIONS)

    def missed(self, seq_id: int) -> None:
        """Nothing was guessed: of what it is usually good for, that is a draft that did not hold."""
        for experience in (self._positions[0], self._all):
            experience.add(1.0, 0.0, 0.0, SHARED_FADES)
        self._streams[seq_id].add(1.0, 0.0, 0.0, FADES)

    def learn(self, seq_id: int, token_ids: Sequence[int], chances: Sequence[float], came: Sequence[int]) -> None:
        """These were drafted and those came in their place. Whether drafts were computed does not matter; of those
        behind the first that did not hold, and of those behind the tokens that came, nothing is known."""
        tried = num_held = 0
        expected = 0.0
        for guess, chance, token_id in zip(token_ids, chances, came, strict=False):
            holds = guess == token_id
            self._positions[min(tried, NUM_POSITIONS - 1)].add(1.0, chance, float(holds), SHARED_FADES)
            tried += 1
            expected += chance
            if not holds:
                break
            num_held += 1
        if tried:
            self._all.add(tried, expected, num_held, SHARED_FADES)
            if seq_id in self._streams:
                self._streams[seq_id].add(tried, expected, num_held, FADES)
