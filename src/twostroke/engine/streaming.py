"""One sample's tokens becoming text as they come: detokenising and stop strings joined. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.text.detokenizer import IncrementalDetokenizer
from twostroke.text.stop_strings import StopStringMatcher
from twostroke.text.tokenizer import Tokenizer


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        include_stop: bool,
        min_tokens: int,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._matcher = StopStringMatcher(tuple(stop), include=include_stop) if stop else None
        self._tokens_before_stop = min_tokens

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found."""
        return None if self._matcher is None else self._matcher.stopped_by

    def push(self, token_id: int) -> tuple[str, bool]:
        """New text that is safe to show, and whether a stop string ended the answer."""
        text = self._detokenizer.push([token_id])
        may_stop = self._tokens_before_stop == 0
        self._tokens_before_stop = max(0, self._tokens_before_stop - 1)
        return (text, False) if self._matcher is None else self._matcher.push(text, may_stop=may_stop)

    def finish(self) -> tuple[str, bool]:
        """What was held back: an unfinished character, the beginning of a stop string that never came."""
        text, stopped = self._detokenizer.finish(), False
        if self._matcher is not None:
            text, stopped = self._matcher.push(text, may_stop=self._tokens_before_stop == 0)
            if not stopped:
                text += self._matcher.finish()
        return text, stopped
