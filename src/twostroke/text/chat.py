"""A conversation to token ids: the model's template, then its tokenizer. Special tokens that someone wrote inside a
message stay plain text, so a user cannot end their own turn or begin another's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from subprocess import Popen
from typing import Any

from twostroke.core.errors import BadRequestError
from twostroke.text.chat_template import ChatTemplate
from twostroke.text.tokenizer import Tokenizer

NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode reserves for a program's own use: two that no message holds mark what must stay text."""


class ChatEncoder:
    def __init__(self, tokenizer: Tokenizer, template_process: Popen[bytes] | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate.of(tokenizer, template_process)
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def encode(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """`options` are those of `ChatTemplate.render`."""
        if self._special is None or not self._holds_special(messages):
            return self._tokenizer.encode(self._template.render(messages, **options), add_special_tokens=False)
        opening, closing = _unused_markers(messages)
        marked = self._mark(messages, opening, closing)
        pieces = re.split(f"{opening}(.*?){closing}", self._template.render(marked, **options), flags=re.DOTALL)
        ids: list[int] = []
        for index, piece in enumerate(pieces):
            ids += self._tokenizer.encode(piece, add_special_tokens=False, parse_special=index % 2 == 0)
        return ids

    def close(self) -> None:
        self._template.close()

    def _holds_special(self, value: object) -> bool:
        assert self._special is not None
        return any(self._special.search(text) for text in _texts(value))

    def _mark(self, value: Any, opening: str, closing: str) -> Any:
        """The same messages with every special token inside their texts set between two markers."""
        assert self._special is not None
        if isinstance(value, str):
            return self._special.sub(lambda match: opening + match[0] + closing, value)
        if isinstance(value, Mapping):
            return {key: self._mark(entry, opening, closing) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._mark(entry, opening, closing) for entry in value]
        return value


def _texts(value: object) -> list[str]:
    """Every text in a message, wherever it is nested."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [text for entry in value for text in _texts(entry)]
    return []


def _unused_markers(messages: object) -> tuple[str, str]:
    used = set("".join(_texts(messages)))
    unused = [character for character in NONCHARACTERS if character not in used]
    if len(unused) < 2:
        raise BadRequestError("messages hold special tokens and every Unicode noncharacter: they cannot be kept apart")
    return unused[0], unused[1]
