"""Arguments of a call as Python writes them: `city="Paris", days=[1, 2])`, from behind the first parenthesis to its
end. Read a character at a time and handed on as JSON. A quote inside a string that nobody escaped is part of it, unless
it is followed by what follows a string."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import NamedTuple

from twostroke.text.tool_parsers.argument_scanner import ArgumentScanner
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""How many digits follow such an escape."""


class _Open(NamedTuple):
    """An object, a list or the call itself."""

    end: str
    json_end: str
    has_names: bool = False
    has_keys: bool = False


_CALL, _DICT = _Open(")", "}", has_names=True), _Open("}", "}", has_keys=True)
_LISTS = {"[": _Open("]", "]"), "(": _Open(")", "]")}


class PythonScanner(ArgumentScanner):
    def __init__(self, name: str) -> None:
        super().__init__(name, self._before_entry)
        self._open = [_CALL]
        self._quote = ""  # of the string that is read; three where it may have more lines
        self._is_key = self._is_empty = False
        self._num_values = 0

    def _before_entry(self, character: str) -> None:
        """Where a name, a key or a value may begin, or the end come."""
        inside = self._open[-1]
        if character in WHITESPACE:
            return
        if character == inside.end:
            self._close()
        elif inside.has_names:
            self._held, self._state = character, self._in_name
            self.has_failed = not (character.isalpha() or character == "_")
        elif inside.has_keys:
            self._begin_string(character, is_key=True)
            self.has_failed = character not in "\"'"
        else:
            self._before_value(character)

    def _in_name(self, character: str) -> None:
        if character == "=":
            self._arguments.append(f"{', ' if self._num_values else '{'}{json.dumps(self._held.strip())}: ")
            self._num_values += 1
            self._held, self._state = "", self._before_value
            return
        self._held += character
        is_part = character.isalnum() or character in "_-. "
        self.has_failed = not is_part or len(self._held) > MAX_NAME_CHARS

    def _before_value(self, character: str) -> None:
        if character in WHITESPACE:
            return
        if character in "{[(":
            self._open.append(_DICT if character == "{" else _LISTS[character])
            self._arguments.append("{" if character == "{" else "[")
            self._state = self._before_entry
        elif character in "\"'":
            self._begin_string(character, is_key=False)
        else:
            self._held, self._state = "", self._in_bare
            self._in_bare(character)

    def _in_bare(self, character: str) -> None:
        """A number or a word."""
        if character in ",)]}":
            self.has_failed = not self._held.strip()
            self._arguments.append(_bare(self._held.strip()))
            self._held = ""
            self._after_value(character)
            return
        self._held += character
        self.has_failed = len(self._held) > MAX_NAME_CHARS

    def _begin_string(self, quote: str, *, is_key: bool) -> None:
        self._quote, self._is_key, self._is_empty, self._held = quote, is_key, True, ""
        self._arguments.append('"')
        self._state = self._in_string

    def _in_string(self, character: str) -> None:
        if self._held.startswith("\\"):
            self._in_escape(character)
        elif character != self._quote[0]:
            self._show(character if character != "\\" else "")
            self._held = character if character == "\\" else ""
        elif len(self._quote) == 1:
            self._held, self._state = character, self._behind_quote
        else:
            self._held += character
            if self._held == self._quote:
                self._end_string()

    def _show(self, text: str) -> None:
        self._arguments.append(json.dumps(self._held + text, ensure_ascii=False)[1:-1])
        self._held, self._is_empty = "", False

    def _in_escape(self, character: str) -> None:
        self._held += character
        kind, digits = self._held[1], self._held[2:]
        if kind in _CODES and all(digit in "0123456789abcdefABCDEF" for digit in digits):
            if len(digits) == _CODES[kind]:
                code, self._held = int(digits, 16), ""
                is_half = 0xD800 <= code <= 0xDFFF  # of a pair, as JSON has it
                if is_half:
                    self._arguments.append(f"\\u{code:04x}")
                else:
                    self._show(chr(code) if code <= 0x10FFFF else "\ufffd")
            return
        held, self._held = self._held, ""
        if kind in _CODES:  # no code after all
            self._show(held[:-1])
            self._in_string(character)
        elif kind in "\\'\"/":
            self._show(kind)
        else:
            self._show(_ESCAPES.get(kind, held))

    def _behind_quote(self, character: str) -> None:
        """Whether it was the string's end shows in what follows it."""
        inside = self._open[-1]
        follows = ":" if self._is_key else f",{inside.end}"
        if character == self._quote and self._held == character and self._is_empty:
            self._quote, self._held, self._state = 3 * character, "", self._in_string
        elif character in WHITESPACE:
            self._held += character
        elif character in follows:
            self._end_string()
            self._state(character)
        else:
            self._state = self._in_string
            held, self._held = self._held, ""
            self._show(held)
            self._in_string(character)

    def _end_string(self) -> None:
        self._held = ""
        self._arguments.append('"')
        self._state = self._after_key if self._is_key else self._after_value

    def _after_key(self, character: str) -> None:
        if character == ":":
            self._arguments.append(": ")
            self._state = self._before_value
        elif character not in WHITESPACE:
            self.has_failed = True

    def _after_value(self, character: str) -> None:
        inside = self._open[-1]
        self._state = self._after_value
        if character == inside.end:
            self._close()
        elif character == ",":
            self._state = self._behind_comma
        elif character not in WHITESPACE:
            self.has_failed = True

    def _behind_comma(self, character: str) -> None:
        """Python lets one stand before an end."""
        if character in WHITESPACE:
            return
        if character != self._open[-1].end and not self._open[-1].has_names:
            self._arguments.append(", ")
        self._state = self._before_entry
        self._before_entry(character)

    def _close(self) -> None:
        closed = self._open.pop()
        self._arguments.append("{}" if closed.has_names and not self._num_values else closed.json_end)
        self.is_done = not self._open
        self._state = self._after_value


def json_of(text: str) -> str | None:
    """A Python value as JSON; None: it is none that this reads."""
    scanner = PythonScanner("")
    for character in f"value={text})":
        if scanner.is_done or scanner.has_failed:
            return None
        scanner.push(character)
    found = scanner.take_arguments() if scanner.is_done and not scanner.has_failed else ""
    return found.removeprefix('{"value": ').removesuffix("}") or None


def _bare(text: str) -> str:
    if text in _WORDS:
        return _WORDS[text]
    for read in (json.loads, lambda text: int(text, 0), float):
        with suppress(ValueError, RecursionError):
            return json.dumps(read(text), allow_nan=False)
    return json.dumps(text, ensure_ascii=False)
