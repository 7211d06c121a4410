"""Who guesses the next tokens of a stream. A drafter is told of every row that opens, of every token that comes, and of
the row's end; in between it proposes. It may be wrong, slow or broken: nothing but speed depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from twostroke.core.request import Request
from twostroke.core.step import Step


class Ask(NamedTuple):
    """Drafts wanted for the tokens behind all that are known of a row."""

    seq_id: int
    most: int


class Proposal(NamedTuple):
    token_ids: tuple[int, ...]
    """The likeliest tokens to come, in order; none: nothing is known."""
    chances: tuple[float, ...]
    """Of each, that it holds if those before it do, as far as the drafter can tell: from 0 to 1."""


NOTHING = Proposal((), ())


class Drafter(Protocol):
    name: str

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        """A row begins, or returns after a preemption, with these tokens known: the prompt's, and of one that returns
        its answer's so far. Called before its prompt is read, so it must be quick: what takes long is for `propose`."""

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """These tokens came: the slot's own, and the drafts before it that held."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        """One for each, of at most `most` tokens."""

    def close(self, seq_id: int) -> None:
        """The row is gone; its tokens may teach others of the same tenant and salt."""


@runtime_checkable
class ComputingDrafter(Drafter, Protocol):
    """One that computes, with KV of its own beside the model's, and so is told what the model computes."""

    def begin(self, step: Step) -> None:
        """A step begins: its rows are open and its blocks granted, of all rows, also of those it does not draft for."""

    def follow(self, done: Any) -> None:
        """A step was computed, and the tokens that came were told (`extend`); the next one is about to begin, and rows
        that left with it are closed. It is not told of steps while its drafts do not pay, or nobody wants any: then it
        lacks what they wrote. `done` is the backend's record of the pass (`backends/host/companions.py`)."""

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        """What `propose` is expected to take for these streams, of that many drafts each; 0: nothing is known yet."""
