"""Arguments of a call in tags, one for each: MiniMax's `<parameter name="city">Paris</parameter>`, Qwen's
`<parameter=city>`, GLM's `<arg_key>city</arg_key><arg_value>Paris</arg_value>`. Read a character at a time and handed
on as JSON; a grammar that holds a model to them. A value is bare text, so what it is follows from the function's
schema: a string as it stands, anything else as JSON, or as Python writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers import python_arguments
from twostroke.text.tool_parsers.argument_scanner import ArgumentScanner
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE
from twostroke.text.tool_parsers.json_rule import json_rule, pattern_rule

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Tags:
    """What stands around a key and around its value."""

    opening: str
    behind_key: str
    closing: str
    end: str
    """Of the call."""
    padding: str = ""
    """White space on both sides of a value that is no part of it."""
    separator: str = "\n"

    @cached_property
    def key(self) -> re.Pattern[str]:
        """Lenient about white space and quotes."""
        opening, behind = self.opening.rstrip('"'), self.behind_key.lstrip('"').strip()
        return re.compile(rf"{_spaced(opening)}\s*(\"[^\"]*\"|'[^']*'|[^<>\"']*?)\s*{_spaced(behind)}", re.DOTALL)

    @cached_property
    def num_ends(self) -> int:
        """How many tags end before a value begins."""
        return self.opening.count(">") + self.behind_key.count(">")

    def head(self, key: str) -> str:
        return f"{self.opening}{key}{self.behind_key}{self.padding}"

    @property
    def tail(self) -> str:
        return self.padding + self.closing

    def arguments(self, values: Mapping[str, object]) -> str:
        """As a model of this format writes them."""
        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in values.items()
        }
        return "".join(f"{self.head(key)}{text}{self.tail}{self.separator}" for key, text in texts.items()) + self.end


def _spaced(marker: str) -> str:
    """A pattern that takes white space where tags meet."""
    return re.escape(marker).replace("\\\n", "").replace("\\ ", r"\s+").replace("><", r">\s*<")


class XmlScanner(ArgumentScanner):
    def __init__(self, name: str, schema: Schema | None, tags: Tags) -> None:
        super().__init__(name, self._between)
        self._tags = tags
        self._properties = _properties(schema or {})
        self._types: frozenset[str] = frozenset()
        self._num_values = 0

    def _between(self, character: str) -> None:
        """Where a tag may begin, and inside it."""
        if not self._held and character in WHITESPACE:
            return
        self._held += character
        if not self._held.startswith("<") or len(self._held) > MAX_NAME_CHARS:
            self.has_failed = True
        elif character == ">":
            self._end_tag()

    def _end_tag(self) -> None:
        tag, num_ends = self._held, self._held.count(">")
        if tag == self._tags.end:
            self._arguments.append("}" if self._num_values else "{}")
            self.is_done = True
        elif match := self._tags.key.fullmatch(tag):
            key = match[1].strip("\"'")
            self._types = _types(self._properties.get(key, {"type": "string"}))
            self._arguments.append(f"{', ' if self._num_values else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            self._num_values += 1
            self._held = ""
            self._state = self._before_text if self._types == {"string"} else self._in_value
        elif num_ends >= self._tags.num_ends:
            self.has_failed = True

    def _before_text(self, character: str) -> None:
        self._arguments.append('"')
        self._state = self._in_text
        if character != self._tags.padding:
            self._in_text(character)

    def _in_text(self, character: str) -> None:
        """A string goes on as it comes, but for what may be the end's beginning."""
        self._held += character
        closing, tail = self._tags.closing, self._tags.tail
        if self._held.endswith(closing):
            text = self._held.removesuffix(closing).removesuffix(self._tags.padding)
            self._arguments.append(f'{_escaped(text)}"')
            self._held, self._state = "", self._between
            return
        kept = max(_begun(self._held, closing), _begun(self._held, tail))
        shown = self._held[: len(self._held) - kept]
        if shown:
            self._arguments.append(_escaped(shown))
            self._held = self._held[len(shown) :]

    def _in_value(self, character: str) -> None:
        self._held += character
        if character == ">" and self._held.endswith(self._tags.closing):
            padding = self._tags.padding
            text = self._held.removesuffix(self._tags.closing).removeprefix(padding).removesuffix(padding)
            self._arguments.append(_value(text, self._types))
            self._held, self._state = "", self._between


def _begun(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of a marker."""
    return next(size for size in range(min(len(marker) - 1, len(text)), -1, -1) if text.endswith(marker[:size]))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str, types: frozenset[str]) -> str:
    """As JSON: what its schema lets it be, and else the text."""
    stripped = text.strip()
    if stripped.lower() in ("true", "false", "null"):
        stripped = stripped.lower()
    stripped = "null" if stripped == "None" else stripped
    try:
        value = json.loads(stripped, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        found = python_arguments.json_of(stripped) if stripped[:1] in ("{", "[", "(") else None
        if found is None:
            return json.dumps(text, ensure_ascii=False)
        value, stripped = ({} if found[0] == "{" else []), found
    kind = _KINDS.get(type(value), "null")
    is_wanted = not types or kind in types or (kind == "integer" and "number" in types)
    return stripped if is_wanted and kind != "string" else json.dumps(text, ensure_ascii=False)


_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _properties(schema: Schema) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: object) -> frozenset[str]:
    """What a value may be; empty: anything."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if isinstance(choices := schema.get("anyOf") or schema.get("oneOf"), list):
        each = [_types(choice) for choice in choices]
        return frozenset().union(*each) if all(each) else frozenset()
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_KINDS.get(type(value), "null") for value in values)
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return frozenset(one for one in kinds if isinstance(one, str))


def xml_rules(rule: str, schema: Schema, tags: Tags, token: Callable[[str], str]) -> list[str]:
    """The grammar of a call's arguments: each named one in the schema's order, those that are not required at will.
    A string is any text, unless it is held to a pattern from its first sign to its last. Without named ones, any.
    `token` writes a text that may be a control token."""
    text, tail = f"{rule}_text", token(tags.tail)
    is_plain = token(tags.closing) == lark_text(tags.closing)
    rules = [f"{text}[lazy]: /(.|\\n)*/ {lark_text(tags.tail)}" if is_plain else f"{text}: /(.|\\n)*/ {tail}"]
    separator = f" {lark_text(tags.separator)}" if tags.separator else ""
    required = schema.get("required") or ()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parts = []
    for index, (key, value) in enumerate(_properties(schema).items()):
        types, name = _types(value), f"{rule}_{index}"
        if types == {"string"} and isinstance(value.get("enum"), list):
            body = f"({' | '.join(map(lark_text, value['enum']))}) {tail}"
        elif types == {"string"} and (pattern := pattern_rule(value)) is not None:
            body = f"{pattern} {tail}"
        elif types == {"string"}:
            body = text
        else:
            body = f"{name}_json {tail}"
            rules.append(f"{name}_json: {json_rule({**shared, **value} if isinstance(value, Mapping) else {})}")
        rules.append(f"{name}: {token(tags.head(key))} {body}{separator}")
        parts.append(name if key in required else f"{name}?")
    if not parts and schema.get("additionalProperties") is not False:
        behind = token(tags.behind_key + tags.padding)
        rules.append(f'{rule}_any: {token(tags.opening)} /[^"\\n<>]{{1,64}}/ {behind} {text}{separator}')
        parts.append(f"{rule}_any*")
    return [f"{rule}: {' '.join(parts)} {token(tags.end)}", *rules]
