"""Grammars of tool calls in a format: nothing but calls, or an answer that may have calls in it. A function is its
`name` and the schema of its `parameters`; one with `lark` takes a single text instead, which follows that grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers.json_rule import json_rule
from twostroke.text.tool_parsers.literal_rules import PYTHON_STYLE, LiteralStyle, gemma_style, literal_rules
from twostroke.text.tool_parsers.xml_arguments import xml_rules

if TYPE_CHECKING:
    from twostroke.text.tool_parsers.formats import ToolFormat

Function = Mapping[str, Any]
ANY_ARGUMENTS = {"type": "object"}
_TEXT = r"TEXT: /(.|\n)*/"
_UNOPENED = r"UNOPENED: /[^<](.|\n)*/"
_TEXT_BUT_NO_CALL = {"{": r"TEXT: /\s*([^{\s](.|\n)*)?/", "[": r"TEXT: /\s*([^\[\s](.|\n)*)?/"}
"""Where a call has no marker, by what it begins with."""


def calls_grammar(
    tool_format: ToolFormat, functions: Sequence[Function], special_tokens: Mapping[str, int], *, only_one: bool
) -> GrammarSpec:
    """At least one call, and nothing else."""
    rules = _Rules(tool_format, functions, special_tokens, only_one)
    return rules.spec(f"start: {rules.preface()}{rules.calls()}")


def answer_grammar(
    tool_format: ToolFormat, functions: Sequence[Function], special_tokens: Mapping[str, int], *, only_one: bool
) -> GrammarSpec:
    """A text with calls in it, or without. Where only one may be, the answer ends behind it. Arguments are any object,
    unless a function is `strict`: a schema that cannot be followed refuses nothing that need not follow it."""
    rules = _Rules(tool_format, _loosened(functions), special_tokens, only_one)
    return rules.spec(f"start: {rules.preface()}({rules.text_with_calls()})")


def either_grammar(
    tool_format: ToolFormat,
    functions: Sequence[Function],
    special_tokens: Mapping[str, int],
    schema: str,
    *,
    only_one: bool,
) -> GrammarSpec:
    """Calls, or an answer that is JSON of this schema. Arguments as in `answer_grammar`."""
    rules = _Rules(tool_format, _loosened(functions), special_tokens, only_one)
    start = f"start: {rules.preface()}(calls | {rules.answer_opening()}format)"
    return rules.spec(f"{start}\ncalls: {rules.calls()}\nformat: {json_rule(json.loads(schema))}")


def raw_head(tool_format: ToolFormat, name: str) -> str:
    """What a call of a function with a grammar of its own begins with, up to its input, in the grammars here; without
    white space before it."""
    return f"{_head(tool_format, name)}{_input_marks(tool_format)[0]}".lstrip()


def raw_tail(tool_format: ToolFormat) -> str:
    """And what it ends with, which is the answer's end too: nobody could tell it from the input else."""
    tail = _input_marks(tool_format)[1] + ("" if tool_format.is_named else "}") + tool_format.closing
    tail += "]" if tool_format.is_list else ""
    return tail if tool_format.wrapper is None or tool_format.begins_bare else tail + tool_format.wrapper[1]


def literal_style(tool_format: ToolFormat) -> LiteralStyle | None:
    if tool_format.arguments == "gemma":
        return gemma_style(tool_format.quote)
    return PYTHON_STYLE if tool_format.arguments == "python" else None


def _input_marks(tool_format: ToolFormat) -> tuple[str, str]:
    """What stands around a raw input within a call's arguments."""
    if (tags := tool_format.tags) is not None:
        return tags.head("input"), f"{tags.tail}{tags.separator}{tags.end}"
    if (style := literal_style(tool_format)) is not None:
        quote = style.quote or '"'
        return f"{style.key[0]}input{style.key[1]}{quote}", f"{quote}{style.end}"
    return '{"input": "', '"}'


def _loosened(functions: Sequence[Function]) -> list[Function]:
    held = [function for function in functions if "lark" in function or function.get("strict")]
    return [function if function in held else {**function, "parameters": ANY_ARGUMENTS} for function in functions]


def _head(tool_format: ToolFormat, name: str) -> str:
    if tool_format.is_named:
        return ""
    return f'{{"name": {json.dumps(name)}, "{tool_format.arguments_key}": '


class _Rules:
    def __init__(
        self,
        tool_format: ToolFormat,
        functions: Sequence[Function],
        special_tokens: Mapping[str, int],
        only_one: bool,
    ) -> None:
        self._format = tool_format
        self._special_tokens = special_tokens
        self._control = _control_tokens(tool_format, special_tokens)
        self._most = 1 if only_one else tool_format.max_calls
        self._rules: list[str] = []
        self._plain = self._add_calls("call", [function for function in functions if "lark" not in function])
        self._raw = self._add_calls("raw", [function for function in functions if "lark" in function])

    def spec(self, start: str) -> GrammarSpec:
        return GrammarSpec("lark", "\n".join([start, *self._rules]))

    def calls(self) -> str:
        block, call = self._format.wrapper, self._format
        if call.begins_bare:
            return self._listed()
        if block is None:
            return self._row(self._token(call.opening), call.separator, self._token(call.closing))
        if call.wraps_each:
            before, behind = block[0] + call.opening, call.closing + block[1]
            return self._row(self._token(before), call.separator, self._token(behind))
        return f"{self._token(block[0])} {self._listed()} {self._token(block[1])}"

    def _listed(self) -> str:
        """What stands in a block."""
        opening, closing = self._token(self._format.opening), self._token(self._format.closing)
        if self._format.is_list:
            return f'"[" {self._row(opening, ", ", closing)} "]"'
        return self._row(opening, self._format.separator, closing)

    def preface(self) -> str:
        """A thought that may stand before all else."""
        if self._format.preface is None:
            return ""
        opening, closing = map(self._token, self._format.preface)
        self._rules.append(f"preface: {opening} THOUGHT {closing}")
        self._rules.append(_TEXT.replace("TEXT", "THOUGHT", 1))
        return "preface? "

    def answer_opening(self) -> str:
        return f"{self._token(self._format.answer_opening)} " if self._format.answer_opening else ""

    def text_with_calls(self) -> str:
        if self._format.answer_opening:  # a text is a message of its own; one without a marker is let be
            self._rules += [_TEXT, _UNOPENED]
            calls = self._row(self._token(self._format.opening), "", "")
            return f'{self.answer_opening()}TEXT | UNOPENED | "" | {calls}'
        call = self._format
        if call.begins_bare:
            self._rules.append(_TEXT_BUT_NO_CALL[call.bare_sign])
            marker = self._token(call.first_marker) if call.first_marker in self._special_tokens else '""'
            return f'TEXT | ({marker} | "") {self._listed()}'
        self._rules.append(_TEXT)
        block = call.wrapper
        opening = self._opening_behind_text(call.opening if block is None else block[0])
        if block is not None and not call.wraps_each:
            return f"TEXT | {opening} {self._listed()} {self._token(block[1])}"
        before, behind = opening, self._lenient(call.closing)
        if block is not None:
            before = f"{opening} {self._lenient(call.opening)}"
            behind = f"{behind} {self._lenient(block[1])}"
        last = " | ".join(f"{before} {rule} {behind}" for rule in (self._plain, self._raw) if rule)
        if self._most == 1 or not self._plain:
            return f"TEXT | {last}"
        return f"({before} {self._plain} {behind}){{0,{self._most - 1}}} (TEXT | {last})"

    def _opening_behind_text(self, marker: str) -> str:
        behind = _optional(marker[len(marker.rstrip()) :])
        marker = marker.strip()
        if (token := self._token(marker)) != lark_text(marker):
            return f"TEXT {token}{behind}"
        self._rules.append(f"opening[lazy]: TEXT {lark_text(marker)}")
        return f"opening{behind}"

    def _lenient(self, marker: str) -> str:
        """With or without the white space around it."""
        inner = marker.strip()
        before, behind = marker[: len(marker) - len(marker.lstrip())], marker[len(marker.rstrip()) :]
        return f"{_optional(before)} {self._token(inner)}{_optional(behind)}" if inner else _optional(marker)

    def _row(self, before: str, separator: str, behind: str) -> str:
        """One call after the other; one whose input is raw can only be the last."""
        parted = f" {lark_text(separator)}" if separator else ""
        last = " | ".join(f"{before} {rule} {behind}" for rule in (self._plain, self._raw) if rule)
        if self._most == 1 or not self._plain:
            return f"({last})"
        return f"({before} {self._plain} {behind}{parted}){{0,{self._most - 1}}} ({last})"

    def _add_calls(self, rule: str, functions: Sequence[Function]) -> str:
        """The name of the rule for a call of one of these; none where there are none."""
        if not functions:
            return ""
        self._rules.append(f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(len(functions))))
        for index, function in enumerate(functions):
            before, tail = lark_text(_head(self._format, function["name"])), ' "}"'
            if self._format.is_named:
                before, tail = f"{self._name(function['name'])} {self._token(self._format.after_name)}", ""
            if "lark" in function:
                head, end = map(self._token, _input_marks(self._format))
                body = f"{head} {rule}_{index}_input {end}"
                self._rules.append(f"{rule}_{index}_input: %lark {{\n{function['lark']}\n}}")
            else:
                body = f"{rule}_{index}_arguments"
                self._rules += self._arguments(body, {"type": "object", **(function.get("parameters") or {})})
            self._rules.append(f"{rule}_{index}: {before} {body}{tail}")
        return rule

    def _name(self, name: str) -> str:
        return f"{lark_text(f'functions.{name}:')} /[0-9]{{1,3}}/" if self._format.is_numbered else lark_text(name)

    def _arguments(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        if self._format.tags is not None:
            return xml_rules(rule, schema, self._format.tags, self._token)
        if (style := literal_style(self._format)) is not None:
            return literal_rules(rule, schema, self._token, style)
        return [f"{rule}: {json_rule(schema)}"]

    def _token(self, text: str) -> str:
        """A control token is named by its id: its text, written out in characters, would be something else."""
        inner = text.strip()
        if not inner:
            return lark_text(text) if text else ""
        # White space stands by itself: what else begins with it would be taken for the beginning of this marker.
        before, _, behind = text.partition(inner)
        parts = [inner] if self._control is None else self._control.split(inner)
        return " ".join(
            f"<[{self._special_tokens[part]}]>" if part in self._special_tokens else lark_text(part)
            for part in (before, *parts, behind)
            if part
        )


def _control_tokens(tool_format: ToolFormat, special_tokens: Mapping[str, int]) -> re.Pattern[str] | None:
    """Those that a format's markers have in them."""
    call, tags = tool_format, tool_format.tags
    marks = [call.opening, call.closing, call.after_name, call.answer_opening, call.quote]
    marks += [*(call.wrapper or ()), *(call.preface or ())]
    marks += [] if tags is None else [tags.opening, tags.behind_key, tags.closing, tags.end]
    found = sorted({token for token in special_tokens for mark in marks if token and token in mark}, key=len)
    return re.compile(f"({'|'.join(map(re.escape, reversed(found)))})") if found else None


def _optional(space: str) -> str:
    return f" {lark_text(space)}?" if space else ""
