"""Grammars of tool calls in a format: nothing but calls, or an answer that may have calls in it. A function is its
`name` and the schema of its `parameters`; one with `lark` takes a single text instead, which follows that grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twostroke.core.grammar import GrammarSpec
from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers import gemma_arguments, xml_arguments
from twostroke.text.tool_parsers.json_rule import json_rule

if TYPE_CHECKING:
    from twostroke.text.tool_parsers.formats import ToolFormat

Function = Mapping[str, Any]
ANY_ARGUMENTS = {"type": "object"}
_CONTROL = re.compile(r"(<\|[^|>]*\|?>|<[^<|>]*\|>)")
"""Control tokens inside a marker."""
_TEXT = r"TEXT: /(.|\n)*/"
_UNOPENED = r"UNOPENED: /[^<](.|\n)*/"
_TEXT_BUT_NO_OBJECT = r"TEXT: /\s*([^{\s](.|\n)*)?/"


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
    """What a call of a function with a grammar of its own begins with, up to its input, in the grammars here."""
    return f"{_head(tool_format, name)}{_input_marks(tool_format)[0]}"


def raw_tail(tool_format: ToolFormat) -> str:
    """And what it ends with, which is the answer's end too: nobody could tell it from the input else."""
    if tool_format.after_name:
        end = f"\n{tool_format.wrapper[1]}" if tool_format.wrapper is not None else tool_format.closing or ""
        return _input_marks(tool_format)[1] + end
    if tool_format.is_list:
        return _INPUT_TAIL + "}]"
    return _INPUT_TAIL + "}" + ("" if tool_format.closing is None else f"\n{tool_format.closing}")


_INPUT_HEAD, _INPUT_TAIL = '{"input": "', '"}'


def _input_marks(tool_format: ToolFormat) -> tuple[str, str]:
    """What stands around a raw input within a call's arguments."""
    if tool_format.arguments == "xml":
        return xml_arguments.INPUT_HEAD, xml_arguments.INPUT_TAIL
    if tool_format.arguments == "gemma":
        return gemma_arguments.INPUT_HEAD, gemma_arguments.INPUT_TAIL
    return _INPUT_HEAD, _INPUT_TAIL


def _loosened(functions: Sequence[Function]) -> list[Function]:
    held = [function for function in functions if "lark" in function or function.get("strict")]
    return [function if function in held else {**function, "parameters": ANY_ARGUMENTS} for function in functions]


def _head(tool_format: ToolFormat, name: str) -> str:
    if tool_format.after_name:
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
        self._most = 1 if only_one else tool_format.max_calls
        self._rules: list[str] = []
        self._plain = self._add_calls("call", [function for function in functions if "lark" not in function])
        self._raw = self._add_calls("raw", [function for function in functions if "lark" in function])

    def spec(self, start: str) -> GrammarSpec:
        return GrammarSpec("lark", "\n".join([start, *self._rules]))

    def calls(self) -> str:
        opening = self._token(self._format.opening)
        if self._format.is_list:
            return f'{opening} "[" {self._row("", ", ", "")} "]"'
        if self._format.begins_bare:
            return self._row("", "", "")
        if self._format.wrapper is not None:
            return self._wrapped(self._token(self._format.wrapper[0]))
        if self._format.after_name:
            return self._row(opening, "", self._closing())
        return self._row(f'{opening} "\\n"', "\n", f'"\\n" {self._token(self._format.closing or "")}')

    def _closing(self) -> str:
        return "" if self._format.closing is None else self._token(self._format.closing)

    def _wrapped(self, opening: str) -> str:
        assert self._format.wrapper is not None
        row = self._row(self._token(self._format.opening), "\n", "")
        return f'{opening} "\\n" {row} "\\n" {self._token(self._format.wrapper[1])}'

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
        self._rules.append(_TEXT_BUT_NO_OBJECT if self._format.begins_bare else _TEXT)
        if self._format.begins_bare:
            marker = self._token(self._format.opening) if self._format.opening in self._special_tokens else '""'
            return f'TEXT | ({marker} | "") ({self._row("", "", "")})'
        opening = self._opening_behind_text()
        if self._format.wrapper is not None:
            return f"TEXT | {self._wrapped(opening)}"
        if self._format.is_list:
            return f'TEXT | {opening} "[" {self._row("", ", ", "")} "]"'
        before, behind = opening, self._closing()
        if not self._format.after_name:
            before, behind = f'{opening} "\\n"?', f'"\\n"? {self._token(self._format.closing or "")}'
        last = " | ".join(f"{before} {rule} {behind}" for rule in (self._plain, self._raw) if rule)
        if self._most == 1 or not self._plain:
            return f"TEXT | {last}"
        return f"({before} {self._plain} {behind}){{0,{self._most - 1}}} (TEXT | {last})"

    def _opening_behind_text(self) -> str:
        marker = self._format.opening if self._format.wrapper is None else self._format.wrapper[0]
        if (token := self._token(marker)) != lark_text(marker):
            return f"TEXT {token}"
        self._rules.append(f"opening[lazy]: TEXT {lark_text(marker)}")
        return "opening"

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
            if self._format.after_name:
                before, tail = f"{lark_text(function['name'])} {self._token(self._format.after_name)}", ""
            if "lark" in function:
                head, end = map(self._token, _input_marks(self._format))
                body = f"{head} {rule}_{index}_input {end}"
                self._rules.append(f"{rule}_{index}_input: %lark {{\n{function['lark']}\n}}")
            else:
                body = f"{rule}_{index}_arguments"
                self._rules += self._arguments(body, {"type": "object", **(function.get("parameters") or {})})
            self._rules.append(f"{rule}_{index}: {before} {body}{tail}")
        return rule

    def _arguments(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        if self._format.arguments == "xml":
            return xml_arguments.xml_rules(rule, schema)
        if self._format.arguments == "gemma":
            return gemma_arguments.gemma_rules(rule, schema, self._token)
        return [f"{rule}: {json_rule(schema)}"]

    def _token(self, text: str) -> str:
        """A control token is named by its id: its text, written out in characters, would be something else."""
        if text in self._special_tokens:
            return f"<[{self._special_tokens[text]}]>"
        parts = [part for part in _CONTROL.split(text) if part]
        if len(parts) > 1 and any(part in self._special_tokens for part in parts):
            return " ".join(map(self._token, parts))
        return lark_text(text)
