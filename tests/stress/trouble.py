"""What may happen to a step, and how long one takes, on a clock that moves by itself alone."""

from __future__ import annotations

from enum import Enum


class Trouble(Enum):
    """What happens to the next step that is launched."""

    LAUNCH = "the backend raises at launch, and has changed nothing"
    LATE_LAUNCH = "the backend raises at launch, behind its copies and some of what it writes"
    RESULT = "the backend raises when it is asked for the result; KV that the step writes is rubbish"
    NOT_FINITE = "one sequence's logits are not finite, and neither is its KV"
    NO_TOKEN = "one sequence gets no token"
    TOO_MANY = "one sequence gets more tokens than were asked for"
    STRAY = "a token comes for a sequence that is not in the step"
    SLOW = "the step takes a hundred times as long"
    INTERRUPT = "Ctrl-C, while the step is waited for"


HARMFUL = (
    Trouble.LAUNCH,
    Trouble.LATE_LAUNCH,
    Trouble.RESULT,
    Trouble.NOT_FINITE,
    Trouble.NO_TOKEN,
    Trouble.TOO_MANY,
)
"""Sequences end with an error by these."""


def seconds_of(num_tokens: int) -> float:
    """What a step takes."""
    return 0.01 + 0.001 * num_tokens


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
