"""The interface of drafters, which guess the next tokens of a stream. A drafter is told of every row that opens, of
every token that comes, and of the row's end. In between it proposes. It may be wrong, slow or broken: only speed
depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twostroke.core.request import Request
from twostroke.core.step import Step


class Ask(NamedTuple):
    """A request for guesses at the tokens that follow all known ones of a row."""

    seq_id: int
    most: int


class Proposal(NamedTuple):
    token_ids: tuple[int, ...]
    """The likeliest next tokens, in order. Empty means that nothing is known."""
    chances: tuple[float, ...]
    """For each token, the chance from 0 to 1 that it holds if those before it do, as far as the drafter can tell."""


NOTHING = Proposal((), ())


class Drafter(Protocol):
    name: str

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        """A row begins, or returns after a preemption. Known are its prompt's tokens and, if it returns, its answer's
        so far. Called before its prompt is read, so it must be quick: slow work belongs in `propose`."""

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """These tokens came: the drafts that held, and the slot's own behind them."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """Returns one proposal for each ask, of at most `most` tokens."""

    def close(self, seq_id: int) -> None:
        """The row is closed. Its tokens may still teach others of the same tenant and salt."""


@runtime_checkable
class ComputingDrafter(Drafter, Protocol):
    """A drafter that computes, with KV of its own beside the model's. So it is told what the model computes."""

    def begin(self, step: Step) -> None:
        """A step begins: its rows are open and its blocks granted. This holds for all rows, even those that it does not
        draft for."""

    def follow(self, done: Any) -> None:
        """A step was computed, and its tokens were told (`extend`). The next one is about to begin, and rows that left
        with it are closed. Steps are not told while drafts do not pay, or while nobody wants any: then the drafter
        lacks what they wrote. `done` is the backend's record of the pass (`backends/host/companions.py`)."""

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        """Returns the predicted seconds of `propose` for that many streams, with that many drafts each. 0 means that
        nothing is known yet."""
