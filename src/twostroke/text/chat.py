"""A conversation to token ids: the model's template, then its tokenizer. Control tokens are what the template wrote,
and nothing else: what a request says anywhere, in a message, a tool or a key, stays plain text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from subprocess import Popen
from typing import Any, NamedTuple

from twostroke.core.errors import BadRequestError
from twostroke.text.chat_template import ChatTemplate, Rendering
from twostroke.text.tokenizer import Tokenizer


class SpelledText(NamedTuple):
    """A rendered conversation as it can be encoded."""

    text: str
    is_guarded: bool
    """In the spelling of the tokenizer's guarded copy."""


class ChatEncoder:
    def __init__(self, tokenizer: Tokenizer, template_process: Popen[bytes] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate.of(tokenizer, template_process)

    def encode(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> list[int]:
        """`options` are those of `ChatTemplate.render`."""
        rendering = self.render(messages, **options)
        for text, is_guarded in spellings(rendering, self._tokenizer):
            ids = self._tokenizer.encode(text, add_special_tokens=False, parse_special=not is_guarded)
            if is_faithful(ids, rendering, self._tokenizer):
                return ids
        raise not_faithful()

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> Rendering:
        return self._template.render_tracked(messages, **options)

    def close(self) -> None:
        self._template.close()


def spellings(rendering: Rendering, tokenizer: Tokenizer) -> Iterator[SpelledText]:
    """Ways to encode it; the first that turns out faithful is to be taken. An ordinary conversation is encoded as it
    stands, as everybody encodes it."""
    if rendering.is_plain:
        yield SpelledText(rendering.text, is_guarded=False)
    if tokenizer.special_tokens:
        yield SpelledText(tokenizer.guarded.spell(rendering.text, rendering.marks), is_guarded=True)


def is_faithful(ids: Sequence[int], rendering: Rendering, tokenizer: Tokenizer) -> bool:
    """Whether every control token among the ids is one that the template wrote. (A normaliser may make one of something
    that was none in the text.)"""
    written = iter([tokenizer.special_tokens[rendering.text[start:end]] for start, end in rendering.marks])
    return all(token_id in written for token_id in tokenizer.specials_in(ids))


def not_faithful() -> BadRequestError:
    return BadRequestError("messages hold text that this model's tokenizer cannot tell from its control tokens")
