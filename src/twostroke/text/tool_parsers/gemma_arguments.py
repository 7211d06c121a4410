"""Arguments of a call as Gemma writes them: `city:<|"|>Paris<|"|>,days:[1,2]}`, from behind the first brace. Keys are
bare, strings stand between marks of their own, the rest is as in JSON. Read a character at a time and handed on as
JSON."""

from __future__ import annotations

import json

from twostroke.text.tool_parsers.argument_scanner import ArgumentScanner
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE

QUOTE = '<|"|>'
_WORDS = {"none": "null", "true": "true", "false": "false", "null": "null"}


class GemmaScanner(ArgumentScanner):
    """From behind the first brace of a call's arguments to their end."""

    def __init__(self, name: str, quote: str = QUOTE) -> None:
        super().__init__(name, self._before_key)
        self._quote = quote
        self._ends = ["}"]  # of the objects and lists that are open
        self._arguments.append("{")

    def _before_key(self, character: str) -> None:
        if character == "}":
            self._close(character)
        elif character not in WHITESPACE:
            self._held, self._state = character, self._in_key

    def _in_key(self, character: str) -> None:
        is_open = self._held.startswith(self._quote) and (
            len(self._held) < 2 * len(self._quote) or not self._held.endswith(self._quote)
        )
        if character == ":" and not is_open:
            key = self._held.strip().removeprefix(self._quote).removesuffix(self._quote).strip('"')
            self._arguments.append(f"{json.dumps(key, ensure_ascii=False)}: ")
            self._held, self._state = "", self._before_value
            return
        self._held += character
        self.has_failed = len(self._held) > MAX_NAME_CHARS or (character in "{}" and not is_open)

    def _before_value(self, character: str) -> None:
        if character in WHITESPACE:
            return
        if character in "{[":
            self._arguments.append(character)
            self._ends.append("}" if character == "{" else "]")
            self._state = self._before_key if character == "{" else self._before_value
        elif character == "]" == self._ends[-1]:
            self._close(character)
        else:
            self._held, self._state = "", self._in_bare
            self._in_bare(character)

    def _in_bare(self, character: str) -> None:
        """A number or a word; or the mark that begins a string, of which some models write JSON's."""
        if character in ",}]" and not self._quote.startswith(self._held or "x"):
            self._arguments.append(_bare(self._held.strip()))
            self._held = ""
            self._after_value(character)
            return
        self._held += character
        if self._held in (self._quote, '"'):
            self._state = self._in_string if self._held == self._quote else self._in_json_string
            self._arguments.append('"')
            self._held = ""
        self.has_failed = len(self._held) > MAX_NAME_CHARS

    def _in_string(self, character: str) -> None:
        """It goes on as it comes, but for what may be the closing mark's beginning."""
        self._held += character
        if self._held.endswith(self._quote):
            self._arguments.append(f'{_escaped(self._held.removesuffix(self._quote))}"')
            self._held, self._state = "", self._after_value
            return
        kept = next(size for size in range(len(self._quote) - 1, -1, -1) if self._held.endswith(self._quote[:size]))
        shown = self._held[: len(self._held) - kept]
        if shown:
            self._arguments.append(_escaped(shown))
            self._held = self._held[len(shown) :]

    def _in_json_string(self, character: str) -> None:
        if self._held == "\\":
            self._arguments.append(f"\\{character}")
            self._held = ""
        elif character == "\\":
            self._held = character
        else:
            self._arguments.append(character if character == '"' else _escaped(character))
            self._state = self._after_value if character == '"' else self._state

    def _after_value(self, character: str) -> None:
        if character == ",":
            self._arguments.append(", ")
            self._state = self._before_key if self._ends[-1] == "}" else self._before_value
        elif character == self._ends[-1]:
            self._close(character)
        elif character not in WHITESPACE:
            self.has_failed = True

    def _close(self, character: str) -> None:
        self._arguments.append(character)
        self._ends.pop()
        self.is_done = not self._ends
        self._state = self._after_value


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _bare(text: str) -> str:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(name: str) -> None:
    raise ValueError(name)
