"""Whether a drafter belongs to its model: one that hardly ever guesses the next token right was made for another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

TRIALS = 400
"""First guesses after which a drafter is judged."""
LEAST_RIGHT = 0.02


@dataclass(slots=True)
class Trust:
    """How often a first guess was right, whether it was computed or not."""

    num_tried: int = 0
    num_right: int = 0
    guesses: dict[int, int] = field(default_factory=dict)
    """Of some streams, what was guessed to come next."""

    def guessed(self, seq_id: int, token_id: int) -> None:
        self.guesses[seq_id] = token_id

    def came(self, seq_id: int, token_ids: Sequence[int]) -> None:
        guess = self.guesses.pop(seq_id, None)
        if guess is not None and token_ids:
            self.num_tried += 1
            self.num_right += guess == token_ids[0]

    def doubt(self, source: str) -> str | None:
        if self.num_tried < TRIALS or self.num_right >= LEAST_RIGHT * self.num_tried:
            return None
        return (
            f"{source} hardly ever guesses right ({self.num_right} of {self.num_tried} first drafts): it was most "
            "likely made for another model"
        )
