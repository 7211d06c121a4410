"""The one text that a custom tool takes, out of the arguments that a model writes: `{"input": "..."}`, decoded as it
comes."""

from __future__ import annotations

import json
import re

_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
LONGEST_BEGINNING = 64
"""Characters; arguments that have not come to their input by then are read when they are whole."""
LONGEST_ESCAPE = 12
"""A surrogate pair."""


class CustomInput:
    def __init__(self) -> None:
        self._arguments = ""
        self._start: int | None = None  # of what is not decoded yet
        self._has_ended = False
        self._shown = ""

    def push(self, arguments: str) -> str:
        """What is new of the input."""
        self._arguments += arguments
        if self._start is None and len(self._arguments) - len(arguments) < LONGEST_BEGINNING:
            match = _BEGINNING.match(self._arguments)
            self._start = None if match is None else match.end()
        return "" if self._start is None or self._has_ended else self._decoded()

    def finish(self) -> str:
        """The rest, the arguments being whole. Another object than was asked for is read as well as can be: its one
        text, or the object itself."""
        try:
            value = json.loads(self._arguments)
        except (ValueError, RecursionError):
            value = None
        text = self._arguments
        if isinstance(value, dict):
            texts = [value["input"]] if "input" in value else list(value.values())
            text = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._arguments
        text = text.encode("utf-8", "replace").decode()  # half a surrogate pair could not be sent
        if not text.startswith(self._shown):  # two inputs: the first was shown, and is kept to
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new

    def _decoded(self) -> str:
        assert self._start is not None
        text, end = self._arguments, self._start
        while end < len(text) and text[end] != '"':
            length = 1
            if text[end] == "\\":
                length = 6 if text[end + 1 : end + 2] == "u" else 2
                is_high = length == 6 and text[end + 2 : end + 4].lower() in ("d8", "d9", "da", "db")
                length = LONGEST_ESCAPE if is_high else length
            if end + length > len(text):
                break
            end += length
        self._has_ended = end < len(text) and text[end] == '"'
        try:
            new: str = json.loads(f'"{text[self._start : end]}"', strict=False)
            new.encode()
        except ValueError:  # half a surrogate pair, or no escape at all: left to the end
            return ""
        self._start = end
        self._shown += new
        return new
