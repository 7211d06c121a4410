"""What an answer must look like, and who watches over it, as the layers see each other: a spec is plain text that may
travel between processes; a matcher says which tokens may come next. Knows no library that does the matching."""

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
    """What stands before it. Unwatched: nothing (`none`), the rest of a thought that the prompt has opened (`open`), or
    a thought if the model opens one (`possible`); the grammar begins behind it. Watched, too (`harmony`): messages of
    that format, thoughts at will and then the final one, whose text the grammar is of."""

    def __post_init__(self) -> None:
        if self.thought not in THOUGHTS:
            raise BadRequestError(f"a grammar's thought must be one of {', '.join(THOUGHTS)}, not {self.thought!r:.40}")
        if self.kind not in GRAMMAR_KINDS:
            raise BadRequestError(f"a grammar's kind must be one of {', '.join(GRAMMAR_KINDS)}, not {self.kind!r:.40}")
        if not isinstance(self.text, str):
            raise BadRequestError(f"a grammar must be text, not {type(self.text).__name__}")

    @property
    def compiled(self) -> GrammarSpec:
        """What is compiled of it: a thought that is not watched makes no other grammar."""
        return self if self.thought in ("none", "harmony") else replace(self, thought="none")


STUCK = "the answer's grammar could not be followed further"


class GrammarStuckError(Exception):
    """The matcher cannot go on: its limits are reached. Only the answer it watches over ends."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{STUCK}: {reason}")


def is_grammar_fault(error: str) -> bool:
    """Whether an answer ended because of its grammar, which came with the request: another try would end there, too."""
    return error.startswith(STUCK)


class TokenMatcher(Protocol):
    """One answer's progress through its grammar."""

    def allowed(self) -> bytes:
        """A bit a token id, the lowest bit of a byte first: whether it may come next. Ids beyond the end may not. An
        end-of-text token may come where the grammar is complete. Raises GrammarStuckError."""

    def advance(self, token_id: int) -> None:
        """This token came."""


@runtime_checkable
class ForeseeingMatcher(TokenMatcher, Protocol):
    """One that also looks ahead. Asking it changes nothing of what it allows."""

    def forced(self) -> Sequence[int]:
        """The tokens that come next, whatever the model thinks of them; none where there is a choice."""

    def num_taken(self, token_ids: Sequence[int]) -> int:
        """Of these tokens, how many could come next, one behind the other."""

    def copy(self) -> TokenMatcher:
        """One that goes its own way from here."""


class Grammars(Protocol):
    """Specs become matchers, for one vocabulary."""

    def check(self, spec: GrammarSpec) -> object:
        """Raise BadRequestError, in one sentence, where the spec cannot be followed. For as long as what is returned is
        held, a matcher for this spec is there at once."""

    def matcher(self, spec: GrammarSpec) -> TokenMatcher:
        """A new one, at the beginning of an answer."""
