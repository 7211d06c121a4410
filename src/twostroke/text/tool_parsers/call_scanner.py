"""One tool call's JSON object, read a character at a time: its name as soon as it is known, its arguments as they come.
Forgives nothing: what is no such object fails, and the caller keeps the text."""

from __future__ import annotations

import json
from typing import Protocol

ARGUMENT_KEYS = ("arguments", "parameters")
WHITESPACE = " \t\r\n"
MAX_NAME_CHARS = 4096


class Scanner(Protocol):
    """What reads one call: of a JSON object, or of arguments written another way."""

    name: str | None
    is_done: bool
    has_failed: bool

    def push(self, character: str) -> None: ...

    @property
    def has_arguments(self) -> bool:
        """Some that were not taken yet."""

    @property
    def is_whole(self) -> bool:
        """Its arguments have come to their end, and its name is known; its own end may be missing."""

    def take_arguments(self) -> str:
        """What is new of them, as JSON; nothing before the name is known."""


class CallScanner:
    def __init__(self) -> None:
        self.name: str | None = None
        self.is_done = False
        self.has_failed = False
        self._state = self._before_object
        self._key = ""
        self._value: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments: list[str] = []
        self._arguments_ended = False
        self._has_rest = False  # it ends with its next value

    @staticmethod
    def of_arguments(name: str) -> CallScanner:
        """For a format that has the name outside: what is pushed is the arguments' object alone."""
        scanner = CallScanner()
        for character in f'{{"name": {json.dumps(name)}, "arguments": ':
            scanner.push(character)
        scanner._has_rest = True
        return scanner

    def push(self, character: str) -> None:
        self._state(character)
        if self._has_rest and self._state == self._before_key and not self.is_done:
            self._finish()

    @property
    def has_arguments(self) -> bool:
        return bool(self._arguments)

    @property
    def is_whole(self) -> bool:
        return self._arguments_ended and self.name is not None

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _before_object(self, character: str) -> None:
        if character == "{":
            self._state = self._before_key
        elif character not in WHITESPACE:
            self.has_failed = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._key, self._escaped = "", False
            self._state = self._inside_key
        elif character == "}":
            self._finish()
        elif character not in WHITESPACE + ",":
            self.has_failed = True

    def _inside_key(self, character: str) -> None:
        if character == '"' and not self._escaped:
            self._state = self._before_value
            return
        self._escaped = character == "\\" and not self._escaped
        self._key += character
        self.has_failed = len(self._key) > MAX_NAME_CHARS

    def _before_value(self, character: str) -> None:
        if character in WHITESPACE + ":":
            return
        self._value, self._depth, self._in_string, self._escaped = [], 0, False, False
        self._state = self._inside_value
        self._inside_value(character)

    def _inside_value(self, character: str) -> None:
        if self._in_string:
            self._add(character)
            if character == '"' and not self._escaped:
                self._in_string = False
                self._end_value_at_top()
            self._escaped = character == "\\" and not self._escaped
        elif self._depth == 0 and self._value and character in WHITESPACE + ",}":  # the end of a bare number or word
            self._end_value()
            self._before_key(character)
        elif character in "}]" and self._depth == 0:
            self.has_failed = True
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            self._add(character)
            if character in "}]":
                self._end_value_at_top()

    def _add(self, character: str) -> None:
        self._value.append(character)
        if self._key in ARGUMENT_KEYS and self._value[0] == "{":
            self._arguments.append(character)

    def _end_value_at_top(self) -> None:
        if self._depth == 0:
            self._end_value()

    def _end_value(self) -> None:
        self._state = self._before_key
        if self._key != "name" and self._key not in ARGUMENT_KEYS:
            return
        if self._key in ARGUMENT_KEYS and self._value[0] == "{":
            self._arguments_ended = True
            return  # they were passed on as they came
        try:
            value = json.loads("".join(self._value))
        except ValueError:
            self.has_failed = True
            return
        if self._key == "name":
            if isinstance(value, str) and value:
                self.name = value
            else:
                self.has_failed = True
        elif isinstance(value, str):  # some models write their arguments as a JSON text inside a string
            if value.strip():
                self._arguments.append(value)
                self._arguments_ended = True
        elif value is not None:
            self.has_failed = True

    def _finish(self) -> None:
        self.is_done = True
        self.has_failed = self.has_failed or self.name is None
