"""A tool-call format, both ways: a parser that splits an answer into content and calls as it comes, and a grammar that
lets a model write nothing but calls of the tools it was given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import WHITESPACE as JSON_WHITESPACE
from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE, CallScanner

MAX_CALLS = 16
"""That a grammar lets a model write in one answer."""


CALL_ID = "[CALL_ID]"
"""Behind it is the model's own id of a call, which nobody asks for: a call has a new one."""


class CallDelta(NamedTuple):
    number: int
    name: str | None
    """Set on a call's first."""
    arguments: str


@dataclass(slots=True)
class Split:
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    opening: str
    """The text that begins a call, or all of them."""
    closing: str | None = None
    """The text that ends one; without it, calls go on to the answer's end."""
    arguments_key: str = "arguments"
    after_name: str = ""
    """What parts a call's name from its arguments, where the two are in no object."""
    skips: str = ""
    """What may stand between calls, beside white space."""
    begins_bare: bool = False
    """An answer that begins with `{` is a call too."""
    is_list: bool = False
    max_calls: int = MAX_CALLS
    has_short_ids: bool = False
    """Calls are named by nine letters and digits, and the template insists."""

    @property
    def markers(self) -> frozenset[str]:
        """That tell it from other formats."""
        return frozenset({self.opening, self.after_name} - {""})

    def new_call_id(self) -> str:
        return uuid4().hex[:9] if self.has_short_ids else f"call_{uuid4().hex[:24]}"

    def parser(self) -> ToolCallParser:
        return ToolCallParser(self)

    def grammar(
        self, functions: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, int], *, only_one: bool
    ) -> GrammarSpec:
        """At least one call of these functions, each of `name` and `parameters`, and nothing else."""
        most = 1 if only_one else self.max_calls
        opening, closing = (_token(text, special_tokens) for text in (self.opening, self.closing or ""))
        rules = []
        if self.is_list:
            rules.append(f'start: {opening} "[" call{_more(", ", "call", most)} "]"')
        elif self.after_name:
            rules.append(f"start: ({opening} call){{1,{most}}}")
        elif self.begins_bare:
            rules.append("start: call")
        else:
            rules.append("start: marked" + _more("\n", "marked", most))
            rules.append(f'marked: {opening} "\\n" call "\\n" {closing}')
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(functions))))
        for index, function in enumerate(functions):
            head, tail = f'{{"name": {json.dumps(function["name"])}, "{self.arguments_key}": ', ' "}"'
            before = lark_text(head)
            if self.after_name:
                before, tail = f"{lark_text(function['name'])} {_token(self.after_name, special_tokens)}", ""
            schema = {**(function.get("parameters") or {}), "x-guidance": {"whitespace_pattern": JSON_WHITESPACE}}
            schema.setdefault("type", "object")
            rules.append(f"call_{index}: {before} arguments_{index}{tail}")
            rules.append(f"arguments_{index}: %json {json.dumps(schema)}")
        return GrammarSpec("lark", "\n".join(rules))


def _more(separator: str, rule: str, most: int) -> str:
    return "" if most == 1 else f" ({lark_text(separator)} {rule}){{0,{most - 1}}}"


def _token(text: str, special_tokens: Mapping[str, int]) -> str:
    """A control token is named by its id: its text, written out in characters, would be something else."""
    return f"<[{special_tokens[text]}]>" if text in special_tokens else lark_text(text)


class ToolCallParser:
    """One answer's. The pieces may be cut anywhere; what only looked like a call comes out as content."""

    def __init__(self, tool_format: ToolFormat) -> None:
        self._format = tool_format
        self._state = self._in_text
        self._scanner: CallScanner | None = None
        self._held = ""  # may be the beginning of a marker
        self._spaces = ""  # shown only if text follows
        self._raw = ""  # of a call whose name is not known yet
        self._has_text = False
        self._is_announced = False
        self.num_calls = 0

    def push(self, text: str) -> Split:
        split = Split()
        for character in text:
            self._state(character, split)
        self._pass_arguments(split)
        return split

    def finish(self) -> Split:
        """What was held back; a call that was cut before its name is content."""
        split = Split()
        self._pass_arguments(split)
        if not self._is_announced:
            self._show(self._raw + self._held, split)
        if self.num_calls == 0:
            split.content += self._spaces
        self._held = self._raw = self._spaces = ""
        return split

    def _in_text(self, character: str, split: Split) -> None:
        self._held += character
        while self._held and not self._format.opening.startswith(self._held):
            if self._format.begins_bare and self._held[0] == "{" and not self._has_text:
                rest, self._held = self._held, ""
                self._begin_call()
                for later in rest:
                    self._state(later, split)
                return
            self._show(self._held[0], split)
            self._held = self._held[1:]
        if self._held == self._format.opening:
            self._raw, self._held = self._held, ""
            self._state = self._naming if self._format.after_name else self._between

    def _naming(self, character: str, split: Split) -> None:
        """Up to the arguments, in a format that has the name before them."""
        self._raw += character
        named = self._raw[len(self._format.opening) :]
        if named.endswith(self._format.after_name):
            name = named.removesuffix(self._format.after_name).partition(CALL_ID)[0].strip()
            if not name:
                self._give_up("", split)
                return
            self._scanner, self._state = CallScanner.of_arguments(name), self._in_call
            self._announce(name, split)
        elif character == "{" or len(named) > MAX_NAME_CHARS:
            self._give_up("", split)

    def _announce(self, name: str, split: Split) -> None:
        split.calls.append(CallDelta(self.num_calls, name, ""))
        self.num_calls += 1
        self._is_announced, self._raw = True, ""

    def _between(self, character: str, split: Split) -> None:
        """Inside a marker, where the next call may begin."""
        if character == "{":
            self._begin_call()
            self._state(character, split)
        elif character in WHITESPACE + self._format.skips:
            self._raw += character if self._raw else ""
        else:
            self._give_up(character, split)

    def _begin_call(self) -> None:
        self._scanner = CallScanner()
        self._is_announced = False
        self._state = self._in_call

    def _in_call(self, character: str, split: Split) -> None:
        scanner = self._scanner
        assert scanner is not None
        if not self._is_announced:
            self._raw += character
        scanner.push(character)
        if scanner.name is not None and not scanner.has_failed and not self._is_announced:
            self._announce(scanner.name, split)
        if scanner.has_failed and not self._is_announced:
            self._give_up("", split)
        elif scanner.is_done or scanner.has_failed:
            self._pass_arguments(split)
            self._scanner, self._is_announced = None, False
            self._state = self._between if self._format.closing is None else self._closing
            if self._format.after_name:
                self._state = self._in_text

    def _closing(self, character: str, split: Split) -> None:
        """After a call, up to its closing marker; what stands before that is no part of anything."""
        self._held += character
        assert self._format.closing is not None
        while self._held and not self._format.closing.startswith(self._held):
            self._held = self._held[1:]
        if self._held == self._format.closing:
            self._held = ""
            self._state = self._in_text

    def _pass_arguments(self, split: Split) -> None:
        if self._scanner is not None and self._is_announced and (new := self._scanner.take_arguments()):
            split.calls.append(CallDelta(self.num_calls - 1, None, new))

    def _give_up(self, character: str, split: Split) -> None:
        """It was no call."""
        self._scanner = None
        raw, self._raw = self._raw + character, ""
        self._state = self._in_text
        self._show(raw, split)

    def _show(self, text: str, split: Split) -> None:
        for character in text:
            if character in WHITESPACE:
                self._spaces += character
                continue
            self._has_text = True
            split.content += self._spaces + character
            self._spaces = ""
