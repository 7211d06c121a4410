"""What an answer must look like, and the interfaces of those who watch over it. A spec is plain text that may travel
between processes. A matcher says which tokens may come next. Knows no library that does the matching."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from twostroke.core.errors import BadRequestError

GRAMMAR_KINDS = ("json_schema", "regex", "choice", "lark")
THOUGHTS = ("none", "open", "possible", "harmony")


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    kind: str
    """`json_schema`, `regex`, `lark`, or `choice` (a JSON list of strings, of which the answer is one)."""
    text: str
    thought: str = "none"
    """What the model writes before the text that follows the grammar. `none`: nothing. `open`: the rest of a thought
    that the prompt has opened. `possible`: a thought, if the model opens one. Nobody watches over these thoughts, and
    the grammar begins behind them. `harmony`: messages of that format, any number of thoughts and then the final
    message, whose text follows the grammar. These messages are watched over, too."""

    def __post_init__(self) -> None:
        if self.thought not in THOUGHTS:
            raise BadRequestError(f"a grammar's thought must be one of {', '.join(THOUGHTS)}, not {self.thought!r:.40}")
        if self.kind not in GRAMMAR_KINDS:
            raise BadRequestError(f"a grammar's kind must be one of {', '.join(GRAMMAR_KINDS)}, not {self.kind!r:.40}")
        if not isinstance(self.text, str):
            raise BadRequestError(f"a grammar must be text, not {type(self.text).__name__}")

    @property
    def compiled(self) -> GrammarSpec:
        """The spec that is compiled for this one. A thought that is not watched over makes no difference to the
        grammar."""
        return self if self.thought in ("none", "harmony") else replace(self, thought="none")


STUCK = "the answer's grammar could not be followed further"


class GrammarStuckError(Exception):
    """The matcher cannot go on: its limits are reached. Only the answer it watches over ends."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{STUCK}: {reason}")


def is_grammar_fault(error: str) -> bool:
    """Whether an answer ended because of its grammar. The grammar came with the request, so another try would end
    there, too."""
    return error.startswith(STUCK)


class TokenMatcher(Protocol):
    """One answer's progress through its grammar."""

    def allowed(self) -> bytes:
        """Returns one bit for each token id, the lowest bit of a byte first: whether the token may come next. Ids
        beyond the end may not. An end-of-text token may come where the grammar is complete. Raises
        GrammarStuckError."""

    def advance(self, token_id: int) -> None:
        """Takes note that this token came."""


@runtime_checkable
class ForeseeingMatcher(TokenMatcher, Protocol):
    """A matcher that also looks ahead. Asking it changes nothing of what it allows."""

    def forced(self) -> Sequence[int]:
        """Returns the tokens that must come next, whatever the model thinks of them. Empty means that there is a
        choice."""

    def num_taken(self, token_ids: Sequence[int]) -> int:
        """Returns how many of these tokens could come next, one behind the other."""

    def copy(self) -> TokenMatcher:
        """Returns a second matcher, which starts from here and goes its own way."""


class Grammars(Protocol):
    """Makes matchers of specs, for one vocabulary."""

    def check(self, spec: GrammarSpec) -> object:
        """Raises BadRequestError, in one sentence, if the spec cannot be followed. As long as the caller holds the
        returned object, a matcher for this spec is made without delay."""

    def matcher(self, spec: GrammarSpec) -> TokenMatcher:
        """Returns a new matcher, at the beginning of an answer."""
