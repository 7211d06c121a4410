"""Whether a drafter belongs to its model: one that hardly ever guesses the next token right was made for another."""

from __future__ import annotations

from dataclasses import dataclass

FEW_TRIALS = 40
"""First guesses after which a drafter that was never right is judged."""
TRIALS = 400
"""Those after which one is judged that hardly ever was."""
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
        """Whether further guesses are needed before it can be judged: until it was right as often as it must be."""
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
