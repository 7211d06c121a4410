"""Turns of an engine's loop in which streams only write, for a simulation to time one by one and to tell the scheduler
of as one step of several tokens a slot. Knows sequences; the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.sequence import Sequence
from twostroke.core.step import Drafts, Step
from twostroke.cost.floor import StepWork
from twostroke.scheduling.plan import Drafting


@dataclass(frozen=True, slots=True)
class Foreseen(Drafting):
    """Several tokens a slot, where it is known what will be sampled: all of these drafts hold."""

    num_tokens: int

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        return Drafts(self.num_tokens - 1) if self.num_tokens > 1 else None


class Glide:
    """Turns in which each of these streams is given a token, and nothing else happens. A turn launches a step and takes
    in the oldest one. Where the engine runs ahead, that is the one before: `before` was in flight already, and the last
    stays in flight."""

    def __init__(
        self, streams: list[Sequence], num_turns: int, before: tuple[Step, float, float] | None = None
    ) -> None:
        self.streams = streams
        self.num_turns = num_turns
        self.before = before
        self._contexts = [one.next_position + 1 for one in streams]
        self.launched_s: list[float] = []
        self.taken_s: list[float] = []
        self.steps: list[tuple[float, float]] = []
        """Of each step its seconds, and when it ends."""

    @property
    def is_over(self) -> bool:
        return len(self.steps) == self.num_turns

    @property
    def work(self) -> StepWork:
        """Of the next turn's step."""
        turn = len(self.steps)
        return StepWork(contexts=[context + turn for context in self._contexts])

    @property
    def oldest_ends_s(self) -> float:
        if self.before is None:
            return self.steps[-1][1]
        return self.before[2] if len(self.steps) == 1 else self.steps[-2][1]
