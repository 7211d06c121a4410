"""One answer's progress through a grammar, by llguidance: what may come next, what must, and of a guess how much could.
Knows neither how grammars are written nor how they are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from twostroke.core.grammar import GrammarStuckError
from twostroke.text.after_thought import is_set

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED = 64
"""Forced tokens that are told at once: no step computes more."""


class GrammarMatcher:
    def __init__(
        self, matcher: LLMatcher, end_mask: bytes, num_tokens: int, on_stuck: Callable[[], None] = lambda: None
    ) -> None:
        self._matcher = matcher
        self._end_mask = end_mask
        self._num_tokens = num_tokens
        self._ahead: list[int] = []
        """What was found to be forced, the next token last: a long text is looked for once, not at each token."""
        self._on_stuck = on_stuck

    def allowed(self) -> bytes:
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return self._end_mask
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._on_stuck()
            raise GrammarStuckError(first_line(self._matcher.get_error()))
        return mask

    def advance(self, token_id: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)  # one that it does not take shows in the next `allowed`
            self._moved(token_id)

    def forced(self) -> list[int]:
        """Cut as the model is used to: where bytes are forced, `allowed` leaves no other token."""
        if self._matcher.is_stopped():
            return []
        if not self._ahead:
            self._ahead = self._matcher.compute_ff_tokens()[::-1]
        return self._ahead[: -MAX_FORCED - 1 : -1]

    def _moved(self, token_id: int) -> None:
        if self._ahead and self._ahead.pop() != token_id:
            self._ahead = []

    def num_taken(self, token_ids: Sequence[int]) -> int:
        if self._matcher.is_stopped():
            return int(not self._matcher.is_error() and bool(token_ids) and is_set(self._end_mask, token_ids[0]))
        # A model may have more ids than its tokenizer, and one of those would end the library's matcher.
        known = takewhile(lambda token_id: token_id < self._num_tokens, token_ids)
        return self._matcher.validate_tokens(list(known))

    def copy(self) -> GrammarMatcher:
        return GrammarMatcher(self._matcher.deep_copy(), self._end_mask, self._num_tokens, self._on_stuck)

    def try_advance(self, token_id: int) -> bool:
        """Whether the grammar takes this token; where it does not, nothing has changed."""
        is_taken = not self._matcher.is_stopped() and self._matcher.try_consume_tokens([token_id]) == 1
        if is_taken:
            self._moved(token_id)
        return is_taken

    def reset(self) -> None:
        """Back to the beginning of the answer."""
        self._matcher.reset()
        self._ahead = []


def first_line(message: str) -> str:
    """The library's messages go on to draw where in the grammar; the first lines say what."""
    for mark in ("<non-verbose/>", "<state>"):
        message = message.partition(mark)[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reason = " ".join(lines[:4])[:300].strip() or "the library does not say why"
    meaning = next((words for code, words in _MEANINGS.items() if code in reason), None)
    return reason if meaning is None else f"{meaning} ({reason})"


_MEANINGS = {"NoExtensionBias": "no text can match it", "ff_tokens": "what it prescribes never ends"}
"""What some of the library's codes say."""
