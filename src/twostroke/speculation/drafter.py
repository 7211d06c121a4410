"""Who guesses the next tokens of a stream. A drafter is told of every row that opens, of every token that comes, and of
the row's end; in between it proposes. It may be wrong, slow or broken: nothing but speed depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from twostroke.core.request import Request


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
