"""A tool-call format: what its calls look like, for the parser that finds them, and a grammar that lets a model write
nothing but calls of the tools it was given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import WHITESPACE as JSON_WHITESPACE
from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers.call_parser import ToolCallParser

MAX_CALLS = 16
"""That a grammar lets a model write in one answer."""


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
