"""How far a drafter's own chances can be believed: the share of the drafts it expects to hold that do hold. It is
learnt for each stream from the stream itself, and from all streams until there are enough drafts. Also learns how often
drafts hold at each position, for decisions before there are any drafts. Old experience fades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

FADES = 0.9
"""The share of a stream's experience that is left after the next trial."""
SHARED_FADES = 0.99
PRIOR_WEIGHT = 2.0
"""A stream begins with the experience of all streams, which counts for this many drafts. The experience of all streams
begins with as many drafts at which the drafter was right about itself."""
NUM_POSITIONS = 16
FIRST_RATE = 0.6
"""The assumed share of drafts that hold, for a drafter that tells no rate of its own and was never tried."""
SUREST = 0.995


@dataclass(slots=True)
class Experience:
    tried: float = 0.0
    expected: float = 0.0
    """How many drafts should have held, by the drafter's own chances."""
    held: float = 0.0

    def add(self, tried: float, expected: float, held: float, fades: float) -> None:
        self.tried = self.tried * fades + tried
        self.expected = self.expected * fades + expected
        self.held = self.held * fades + held

    def scale(self, prior: float) -> float:
        """Returns the factor that corrects the drafter's own chances."""
        return (self.held + PRIOR_WEIGHT * prior) / (self.expected + PRIOR_WEIGHT)

    def rate(self, prior: float) -> float:
        """Returns the share of drafts that held."""
        return (self.held + PRIOR_WEIGHT * prior) / (self.tried + PRIOR_WEIGHT)


@dataclass(slots=True)
class Acceptance:
    """What is known of the drafts of one drafter."""

    first_rate: float = FIRST_RATE
    _all: Experience = field(default_factory=Experience)
    _positions: list[Experience] = field(default_factory=lambda: [Experience() for _ in range(NUM_POSITIONS)])
    _streams: dict[int, Experience] = field(default_factory=dict)

    def open(self, seq_id: int) -> None:
        self._streams.setdefault(seq_id, Experience())

    def close(self, seq_id: int) -> None:
        self._streams.pop(seq_id, None)

    def survivals(self, seq_id: int, chances: Sequence[float]) -> list[float]:
        """Returns, for each draft, the chance that it and all before it hold."""
        if not chances:
            return []
        shared = self._all.scale(1.0)
        stream = self._streams[seq_id].scale(shared)
        found, survival = [], 1.0
        for chance, position in zip(chances, self._places(len(chances)), strict=True):
            # How good this position is compared with the average one, for all streams.
            place = position.scale(shared) / shared if shared > 0 else 1.0
            survival *= min(SUREST, chance * stream * place)
            found.append(survival)
        return found

    def usual_survivals(self, seq_id: int, count: int) -> list[float]:
        """Returns these chances for drafts that are not made yet."""
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
        """Notes that nothing was guessed. In the usual rate this counts as a draft that did not hold."""
        for experience in (self._positions[0], self._all):
            experience.add(1.0, 0.0, 0.0, SHARED_FADES)
        self._streams[seq_id].add(1.0, 0.0, 0.0, FADES)

    def learn(self, seq_id: int, token_ids: Sequence[int], chances: Sequence[float], came: Sequence[int]) -> None:
        """Notes that these tokens were guessed, and which ones came in their place. Whether the guesses were computed
        does not matter. Nothing is learnt from guesses behind the first that did not hold, or behind the tokens that
        came."""
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
