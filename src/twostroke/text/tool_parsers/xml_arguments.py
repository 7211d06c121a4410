"""Arguments of a call as MiniMax M2 writes them, a tag each: `<parameter name="city">Paris</parameter>`, up to
`</invoke>`. Read a character at a time and handed on as JSON; a grammar that holds a model to them. A value is bare
text, so what it is follows from the function's schema: a string as it stands, anything else as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE
from twostroke.text.tool_parsers.json_rule import json_rule, pattern_rule

_OPENING, _CLOSING, _END = '<parameter name="', "</parameter>", "</invoke>"
INPUT_HEAD, INPUT_TAIL = f'\n{_OPENING}input">', f"{_CLOSING}\n{_END}"
_PARAMETER = re.compile(r"<parameter\s+name=(\"[^\"]*\"|'[^']*'|[^>\s]+)\s*>")
Schema = Mapping[str, Any]


class XmlScanner:
    """From behind the name of a call to its end."""

    def __init__(self, name: str, schema: Schema | None) -> None:
        self.name: str | None = name
        self.is_done = self.has_failed = False
        self._properties = _properties(schema or {})
        self._state = self._between
        self._held = ""
        self._types: frozenset[str] = frozenset()
        self._num_values = 0
        self._arguments: list[str] = []

    @property
    def has_arguments(self) -> bool:
        return bool(self._arguments)

    @property
    def is_whole(self) -> bool:
        return self.is_done

    def take_arguments(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, character: str) -> None:
        self._state(character)

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
        tag, self._held = self._held, ""
        if tag == _END:
            self._arguments.append("}" if self._num_values else "{}")
            self.is_done = True
        elif match := _PARAMETER.fullmatch(tag):
            key = match[1].strip("\"'")
            self._types = _types(self._properties.get(key, {"type": "string"}))
            self._arguments.append(f"{', ' if self._num_values else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            self._num_values += 1
            self._state = self._in_text if self._types == {"string"} else self._in_value
            self._arguments += ['"'] if self._types == {"string"} else []
        else:
            self.has_failed = True

    def _in_text(self, character: str) -> None:
        """A string goes on as it comes, but for what may be the end's beginning."""
        self._held += character
        if self._held.endswith(_CLOSING):
            self._arguments.append(f'{_escaped(self._held.removesuffix(_CLOSING))}"')
            self._held, self._state = "", self._between
            return
        kept = next(size for size in range(len(_CLOSING) - 1, -1, -1) if self._held.endswith(_CLOSING[:size]))
        shown = self._held[: len(self._held) - kept]
        if shown:
            self._arguments.append(_escaped(shown))
            self._held = self._held[len(shown) :]

    def _in_value(self, character: str) -> None:
        self._held += character
        if character == ">" and self._held.endswith(_CLOSING):
            self._arguments.append(_value(self._held.removesuffix(_CLOSING), self._types))
            self._held, self._state = "", self._between


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _value(text: str, types: frozenset[str]) -> str:
    """As JSON: what its schema lets it be, and else the text."""
    stripped = text.strip()
    if stripped.lower() in ("true", "false", "null"):
        stripped = stripped.lower()
    try:
        value = json.loads(stripped, parse_constant=lambda name: name)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
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


def xml_rules(rule: str, schema: Schema) -> list[str]:
    """The grammar of a call's arguments: each named one in the schema's order, those that are not required at will.
    A string is any text, unless it is held to a pattern from its first sign to its last. Without named ones, any."""
    text = f"{rule}_text"
    rules = [f"{text}[lazy]: /(.|\\n)*/ {lark_text(_CLOSING)}"]
    required, shared = (
        schema.get("required") or (),
        {key: schema[key] for key in ("$defs", "definitions") if key in schema},
    )
    parts = []
    for index, (key, value) in enumerate(_properties(schema).items()):
        types, name = _types(value), f"{rule}_{index}"
        if types == {"string"} and isinstance(value.get("enum"), list):
            body = f"({' | '.join(map(lark_text, value['enum']))}) {lark_text(_CLOSING)}"
        elif types == {"string"} and (pattern := pattern_rule(value)) is not None:
            body = f"{pattern} {lark_text(_CLOSING)}"
        elif types == {"string"}:
            body = text
        else:
            body = f"{name}_json {lark_text(_CLOSING)}"
            rules.append(f"{name}_json: {json_rule({**shared, **value} if isinstance(value, Mapping) else {})}")
        head = lark_text(f'{_OPENING}{key}">')
        rules.append(f'{name}: {head} {body} "\\n"')
        parts.append(name if key in required else f"{name}?")
    if not parts and schema.get("additionalProperties") is not False:
        rules.append(f'{rule}_any: {lark_text(_OPENING)} /[^"\\n<>]{{1,64}}/ "\\">" {text} "\\n"')
        parts.append(f"{rule}_any*")
    return [f'{rule}: "\\n" {" ".join(parts)} {lark_text(_END)}', *rules]
