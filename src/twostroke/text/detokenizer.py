"""Tokens to text as they come, whole characters only. The pieces of a stream join to exactly `Tokenizer.decode` of all
its tokens; each token is looked at once, so a long answer costs no more a token than a short one."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from twostroke.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _UTF8("replace")
        self._spaces_to_drop = tokenizer.leading_spaces_dropped

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens complete; the bytes of an unfinished character are held back."""
        tokenizer, skip = self._tokenizer, self._skip_special_tokens
        raw = b"".join(
            tokenizer.token_bytes(token_id) for token_id in token_ids if not (skip and tokenizer.is_special(token_id))
        )
        return self._without_leading_space(self._decoder.decode(raw))

    def finish(self) -> str:
        """What is held back; a character that never completed becomes U+FFFD."""
        return self._without_leading_space(self._decoder.decode(b"", final=True))

    def _without_leading_space(self, text: str) -> str:
        while text and self._spaces_to_drop:
            if not text.startswith(" "):
                self._spaces_to_drop = 0
                break
            text = text[1:]
            self._spaces_to_drop -= 1
        return text
