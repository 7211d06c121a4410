"""A drafter that guesses the tokens at which a grammar leaves no choice, so its guesses are as good as certain. Keeps
nothing of its own: the matcher that watches over a row's answer knows all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from twostroke.core.grammar import ForeseeingMatcher, TokenMatcher
from twostroke.core.request import Request
from twostroke.speculation.drafter import NOTHING, Ask, Proposal

CERTAIN = 1.0

MatcherOf = Callable[[int], TokenMatcher | None]
"""Returns the matcher that watches over a row's answer, at its next token."""


class GrammarDrafter:
    name = "grammar"

    def __init__(self) -> None:
        self._matcher_of: MatcherOf = _nothing

    def watch(self, matcher_of: MatcherOf) -> None:
        self._matcher_of = matcher_of

    def open(self, seq_id: int, request: Request, token_ids: Sequence[int]) -> None:
        return

    def extend(self, seq_id: int, token_ids: Sequence[int]) -> None:
        return

    def close(self, seq_id: int) -> None:
        return

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        return [self._proposal(ask) for ask in asks]

    def _proposal(self, ask: Ask) -> Proposal:
        matcher = self._matcher_of(ask.seq_id)
        if not isinstance(matcher, ForeseeingMatcher):
            return NOTHING
        token_ids = tuple(matcher.forced()[: ask.most])
        return Proposal(token_ids, (CERTAIN,) * len(token_ids))


def _nothing(seq_id: int) -> TokenMatcher | None:
    return None
