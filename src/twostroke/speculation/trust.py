"""Judges whether a drafter belongs to its model. One that hardly ever guesses the next token right was made for
another."""

from __future__ import annotations

from dataclasses import dataclass

FEW_TRIALS = 40
"""After this many first guesses a drafter is judged that was never right."""
TRIALS = 400
"""After this many first guesses a drafter is judged that was hardly ever right."""
LEAST_RIGHT = 0.02


@dataclass(slots=True)
class Trust:
    """How often a first guess was right, whether it was computed or not."""

    num_tried: int = 0
    num_right: int = 0

    def learn(self, is_right: bool) -> None:
        self.num_tried += 1
        self.num_right += is_right

    @property
    def is_open(self) -> bool:
        """Whether it cannot be judged yet. That ends when it was right as often as it must be, or was tried often
        enough."""
        return self.num_tried < TRIALS and self.num_right < LEAST_RIGHT * TRIALS

    @property
    def is_foreign(self) -> bool:
        if self.num_tried >= TRIALS:
            return self.num_right < LEAST_RIGHT * self.num_tried
        return self.num_tried >= FEW_TRIALS and not self.num_right

    def doubt(self, source: str) -> str | None:
        if not self.is_foreign:
            return None
        return (
            f"{source} hardly ever guesses right ({self.num_right} of {self.num_tried} first drafts): it was most "
            "likely made for another model"
        )
