"""Drafts that are supposed to hold with a given chance: what they bring, how many pay, and a draw for a simulation that
is the same each time. Knows no drafter, and counts no time of one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Series
from dataclasses import dataclass

from twostroke.core.errors import BadRequestError
from twostroke.core.sequence import Sequence
from twostroke.core.speculation import MAX_DRAFTS, expected_tokens
from twostroke.core.step import Drafts
from twostroke.cost.floor import StepWork
from twostroke.scheduling.plan import Drafting

StepSeconds = Callable[[StepWork], float]
REPEATS = 16
"""Steps for which the number of drafts is kept, while as many streams run."""


@dataclass(frozen=True, slots=True)
class Speculating:
    accept: float
    """The chance that a draft holds where all before it do."""
    drafts: int
    """That a stream may have in a step; fewer are computed where fewer pay."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.accept <= 1.0:
            raise BadRequestError(f"accept must be from 0 to 1, not {self.accept:g}")
        if not 1 <= self.drafts <= MAX_DRAFTS:
            raise BadRequestError(f"drafts must be from 1 to {MAX_DRAFTS}, not {self.drafts}")

    @classmethod
    def of_length(cls, accepted_length: float, drafts: int) -> Speculating:
        """By the tokens that a step brings on average with all of its drafts computed, its own token among them."""
        if not 1.0 <= accepted_length <= drafts + 1:
            raise BadRequestError(
                f"an accepted length with {drafts} drafts is from 1 to {drafts + 1}, not {accepted_length:g}"
            )
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            shorter = cls(middle, drafts).tokens(drafts) < accepted_length
            low, high = (middle, high) if shorter else (low, middle)
        return cls(high, drafts)

    def tokens(self, num_drafts: int) -> float:
        """That a step with this many drafts brings a stream."""
        return expected_tokens(self.accept, num_drafts)

    def best(self, step_seconds: StepSeconds, contexts: Series[int]) -> tuple[int, float]:
        """For streams at these contexts, the number of drafts of each with the most tokens a second; and the seconds of
        such a step."""
        steps_s = [step_seconds(work_with(count, contexts)) for count in range(self.drafts + 1)]
        count = max(range(self.drafts + 1), key=lambda count: (self.tokens(count) / steps_s[count], -count))
        return count, steps_s[count]

    def a_token(self, step_seconds: StepSeconds) -> StepSeconds:
        """Of a step that only writes, the seconds that it takes for each token of a stream; of another, its own."""

        def seconds(work: StepWork) -> float:
            if work.chunks or not work.contexts:
                return step_seconds(work)
            count, step_s = self.best(step_seconds, work.contexts)
            return step_s / self.tokens(count)

        return seconds

    def held(self, seq_id: int, step_id: int, num_drafts: int) -> int:
        """How many of a slot's drafts hold, drawn by their names."""
        for place in range(num_drafts):
            if _draw(seq_id, step_id, place) >= self.accept:
                return place
        return num_drafts

    @property
    def note(self) -> str:
        return (
            f"speculation: up to {self.drafts} drafts a stream and step where they pay, each of which holds with a "
            f"chance of {self.accept:.2f}: {self.tokens(self.drafts):.2f} tokens a step with all of them; the time of "
            "making them is not counted"
        )


def work_with(num_drafts: int, contexts: Series[int]) -> StepWork:
    """A step of streams at these contexts, with this many drafts each."""
    if not num_drafts:
        return StepWork(contexts=contexts)
    return StepWork(contexts=[one + num_drafts for one in contexts], queries=[1 + num_drafts] * len(contexts))


def _draw(*names: int) -> float:
    """From 0 to 1, spread evenly: the same for the same names (the finaliser of splitmix64)."""
    mixed = 0
    for name in names:
        mixed = (mixed + name + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed / 2**64


class SupposedDrafting(Drafting):
    """As many drafts for every stream as pay, by what steps cost."""

    def __init__(self, speculating: Speculating, step_seconds: StepSeconds) -> None:
        self._speculating = speculating
        self._step_seconds = step_seconds
        self._num_streams = self._age = self._count = 0

    def begin(self, running: Series[Sequence]) -> None:
        self._age += 1
        if len(running) == self._num_streams and self._age < REPEATS:
            return
        self._num_streams, self._age, self._count = len(running), 0, 0
        if running:
            contexts = [one.next_position + 1 for one in running]
            self._count, _ = self._speculating.best(self._step_seconds, contexts)

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        count = min(most, self._count)
        return Drafts(count) if count else None
