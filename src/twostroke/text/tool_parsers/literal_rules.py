"""Grammars of arguments that are no JSON but near it: Gemma's `city:<|"|>Paris<|"|>,days:[1,2]}` and Python's
`city="Paris", days=[1, 2])`. Named ones in a fixed order, those that are not required at will."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers.json_rule import json_rule, pattern_rule

Schema = Mapping[str, Any]
Token = Callable[[str], str]
"""Writes a text that may be a control token."""
_PLAIN_KEY = r"/[^:,{}\[\]\"<>\s]{1,64}/"
_NAME = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
_SCALARS = ("integer", "number", "boolean", "null")


@dataclass(frozen=True, slots=True)
class LiteralStyle:
    separator: str
    key: tuple[str, str]
    """What stands around the name of an argument."""
    inner_key: tuple[str, str]
    """And around a key of an object in it."""
    any_key: tuple[str, str]
    """Rules of names and of keys that no schema says."""
    end: str
    quote: str = ""
    """Around a text; none: it is a text of JSON."""
    words: Mapping[str, str] = field(default_factory=dict)
    """How JSON's words are written, where that is not as in JSON."""
    is_sorted: bool = False

    def text(self, value: object) -> str:
        """A value, as a model of this style writes it."""
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}" if self.quote else json.dumps(value, ensure_ascii=False)
        if isinstance(value, Mapping):
            return "{" + self.fields(value, self.inner_key) + "}"
        if isinstance(value, list):
            return "[" + self.separator.join(map(self.text, value)) + "]"
        return self.words.get(json.dumps(value), json.dumps(value))

    def fields(self, values: Mapping[str, object], key: tuple[str, str]) -> str:
        items = sorted(values.items()) if self.is_sorted else values.items()
        return self.separator.join(f"{key[0]}{name}{key[1]}{self.text(value)}" for name, value in items)

    def arguments(self, values: Mapping[str, object]) -> str:
        return self.fields(values, self.key) + self.end


def gemma_style(quote: str) -> LiteralStyle:
    return LiteralStyle(",", ("", ":"), ("", ":"), (_PLAIN_KEY, _PLAIN_KEY), "}", quote, is_sorted=True)


PYTHON_STYLE = LiteralStyle(
    separator=", ",
    key=("", "="),
    inner_key=('"', '": '),
    any_key=(_NAME, r"/[^\"\\\n]{0,64}/"),
    end=")",
    words={"true": "True", "false": "False", "null": "None"},
)


def literal_rules(rule: str, schema: Schema, token: Token, style: LiteralStyle) -> list[str]:
    """The grammar of a call's arguments, their end among them."""
    return _Rules(rule, token, style).all_of(schema)


class _Rules:
    def __init__(self, rule: str, token: Token, style: LiteralStyle) -> None:
        self._rule, self._style, self._quote = rule, style, token(style.quote) if style.quote else ""
        self._separator = lark_text(style.separator)
        self._rules: list[str] = []
        self._number = 0

    def all_of(self, schema: Schema) -> list[str]:
        rule, style = self._rule, self._style
        fields = self._fields(schema, is_top=True)
        inner = self._row(f"{rule}_field")
        value = f'{rule}_string | {rule}_bare | "{{" ({inner})? "}}" | {self._list()}'
        anything = [
            f"{rule}_value: {value}",
            f"{rule}_bare: {self._scalar({'type': list(_SCALARS)})}",
            *(f"{rule}_{name}: {self._any_field(is_top=name == 'argument')}" for name in ("field", "argument")),
        ]
        return [f"{rule}: {fields} {lark_text(style.end)}", *self._strings(), *anything, *self._rules]

    def _strings(self) -> list[str]:
        rule, quote = self._rule, self._quote
        if not quote:
            return [f"{rule}_string: {json_rule({'type': 'string'})}"]
        if quote == lark_text(self._style.quote):  # no control token: the first that comes ends it
            return [f"{rule}_string: {quote} {rule}_end", f"{rule}_end[lazy]: /(.|\\n)*/ {quote}"]
        return [f"{rule}_string: {quote} /(.|\\n)*/ {quote}"]

    def _any_field(self, *, is_top: bool) -> str:
        before, behind = self._style.key if is_top else self._style.inner_key
        parts = [lark_text(before) if before else "", self._style.any_key[not is_top], lark_text(behind)]
        return " ".join([*filter(None, parts), f"{self._rule}_value"])

    def _row(self, entry: str) -> str:
        return f"{entry} ({self._separator} {entry})*"

    def _list(self) -> str:
        return f'"[" ({self._row(f"{self._rule}_value")})? "]"'

    def _fields(self, schema: Schema, *, is_top: bool = False) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            anything = f"({self._row(self._rule + ('_argument' if is_top else '_field'))})?"
            return anything if schema.get("additionalProperties") is not False else ""
        required = set(schema.get("required") or ())
        before, behind = self._style.key if is_top else self._style.inner_key
        items = sorted(properties.items()) if self._style.is_sorted else properties.items()
        named = [
            (f"{lark_text(f'{before}{key}{behind}')} {self._value(value)}", key in required) for key, value in items
        ]
        return self._parted(named)

    def _parted(self, fields: Sequence[tuple[str, bool]]) -> str:
        """With a separator between any two that are there: whether one came before is known by the rule itself."""
        first = after = ""
        for field_rule, is_needed in reversed(fields):
            name = self._add(f"{self._separator} {field_rule} {after}".strip())
            start = self._add(f"{field_rule} {after}".strip())
            first = start if is_needed else self._add(f"{start} | {first}" if first else f"{start}?")
            after = name if is_needed else self._add(f"{name} | {after}" if after else f"{name}?")
        return first

    def _add(self, body: str) -> str:
        self._number += 1
        name = f"{self._rule}_{self._number}"
        self._rules.append(f"{name}: {body}")
        return name

    def _value(self, schema: object) -> str:
        if not isinstance(schema, Mapping):
            return f"{self._rule}_value"
        if "const" in schema:
            return self._literal(schema["const"])
        if isinstance(values := schema.get("enum"), list):
            return f"({' | '.join(map(self._literal, values))})"
        kind = schema.get("type")
        choices = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(kind, list):
            choices = [{**schema, "type": one} for one in kind]
        if isinstance(choices, list) and choices:
            return f"({' | '.join(map(self._value, choices))})"
        if kind == "string":
            return self._string(schema)
        if kind == "object":
            return f'"{{" {self._fields(schema)} "}}"'
        if kind == "array":
            return self._items(schema)
        if kind in _SCALARS:
            return self._add(self._scalar(schema))
        return f"{self._rule}_value"  # of no kind, or of one that stands elsewhere: any

    def _string(self, schema: Schema) -> str:
        if not self._quote:
            return self._add(json_rule(schema))
        pattern = pattern_rule(schema)
        return f"{self._rule}_string" if pattern is None else f"{self._quote} {pattern} {self._quote}"

    def _scalar(self, schema: Schema) -> str:
        """As JSON, but for its words."""
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        words = {"boolean": ("true", "false"), "null": ("null",)} if self._style.words else {}
        rules = [lark_text(self._style.words[word]) for kind in kinds for word in words.get(kind, ())]
        if others := [kind for kind in kinds if kind not in words]:
            rules.append(self._add(json_rule({**schema, "type": others if len(others) > 1 else others[0]})))
        return " | ".join(rules)

    def _items(self, schema: Schema) -> str:
        item = self._add(self._value(schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(least) is not int or least < 0:
            least = 0
        further = f"{{{max(least - 1, 0)},{most - 1 if type(most) is int else ''}}}"
        if most == 0:
            return '"[" "]"'
        return f'"[" ({item} ({self._separator} {item}){further}){"" if least else "?"} "]"'

    def _literal(self, value: object) -> str:
        if isinstance(value, str) and self._quote:
            return f"{self._quote} {lark_text(value)} {self._quote}"
        return lark_text(self._style.text(value))
