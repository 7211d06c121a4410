"""Arguments of a call as Gemma 4 writes them: `city:<|"|>Paris<|"|>,days:[1,2]}`, from behind the first brace. Keys are
bare, strings stand between marks of their own, the rest is as in JSON. Read a character at a time and handed on as
JSON; a grammar that holds a model to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twostroke.text.grammar import lark_text
from twostroke.text.tool_parsers.call_scanner import MAX_NAME_CHARS, WHITESPACE
from twostroke.text.tool_parsers.json_rule import json_rule, pattern_rule

QUOTE = '<|"|>'
INPUT_HEAD, INPUT_TAIL = f"input:{QUOTE}", f"{QUOTE}}}"
_WORDS = {"none": "null", "true": "true", "false": "false", "null": "null"}
Schema = Mapping[str, Any]
Token = Callable[[str], str]


class GemmaScanner:
    """From behind the first brace of a call's arguments to their end."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.is_done = self.has_failed = False
        self._ends = ["}"]  # of the objects and lists that are open
        self._state = self._before_key
        self._held = ""
        self._arguments = ["{"]

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

    def _before_key(self, character: str) -> None:
        if character == "}":
            self._close(character)
        elif character not in WHITESPACE:
            self._held, self._state = character, self._in_key

    def _in_key(self, character: str) -> None:
        is_open = self._held.startswith(QUOTE) and (len(self._held) < 2 * len(QUOTE) or not self._held.endswith(QUOTE))
        if character == ":" and not is_open:
            key = self._held.strip().removeprefix(QUOTE).removesuffix(QUOTE).strip('"')
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
        if character in ",}]" and not QUOTE.startswith(self._held or "x"):
            self._arguments.append(_bare(self._held.strip()))
            self._held = ""
            self._after_value(character)
            return
        self._held += character
        if self._held in (QUOTE, '"'):
            self._state = self._in_string if self._held == QUOTE else self._in_json_string
            self._arguments.append('"')
            self._held = ""
        self.has_failed = len(self._held) > MAX_NAME_CHARS

    def _in_string(self, character: str) -> None:
        """It goes on as it comes, but for what may be the closing mark's beginning."""
        self._held += character
        if self._held.endswith(QUOTE):
            self._arguments.append(f'{_escaped(self._held.removesuffix(QUOTE))}"')
            self._held, self._state = "", self._after_value
            return
        kept = next(size for size in range(len(QUOTE) - 1, -1, -1) if self._held.endswith(QUOTE[:size]))
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


def gemma_rules(rule: str, schema: Schema, token: Token) -> list[str]:
    """The grammar of a call's arguments, their closing brace among them: named ones in the order of their names, as the
    model was taught, those that are not required at will. `token` writes a text that may be a control token."""
    return _Rules(rule, token).all_of(schema)


class _Rules:
    def __init__(self, rule: str, token: Token) -> None:
        self._rule, self._quote = rule, token(QUOTE)
        self._rules: list[str] = []
        self._number = 0

    def all_of(self, schema: Schema) -> list[str]:
        rule, fields = self._rule, self._fields(schema)
        text = [f"{rule}_string: {self._quote} /(.|\\n)*/ {self._quote}"]
        if self._quote == lark_text(QUOTE):  # no control token: the first that comes ends it
            text = [f"{rule}_string: {self._quote} {rule}_end", f"{rule}_end[lazy]: /(.|\\n)*/ {self._quote}"]
        value = f'{rule}_string | {rule}_bare | "{{" {self._any_fields()} "}}" | {self._list()}'
        anything = [
            f"{rule}_value: {value}",
            f"{rule}_bare: {json_rule({'type': ['number', 'boolean', 'null']})}",
            f'{rule}_field: /[^:,{{}}\\[\\]"<>\\s]{{1,64}}/ ":" {rule}_value',
        ]
        return [f'{rule}: {fields} "}}"', *text, *anything, *self._rules]

    def _any_fields(self) -> str:
        return f'({self._rule}_field ("," {self._rule}_field)*)?'

    def _list(self) -> str:
        return f'"[" ({self._rule}_value ("," {self._rule}_value)*)? "]"'

    def _fields(self, schema: Schema) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return self._any_fields() if schema.get("additionalProperties") is not False else ""
        required = set(schema.get("required") or ())
        named = [
            (f"{lark_text(f'{key}:')} {self._value(value)}", key in required)
            for key, value in sorted(properties.items())
        ]
        return self._parted(named)

    def _parted(self, fields: Sequence[tuple[str, bool]]) -> str:
        """With a comma between any two that are there: whether one came before is known by the rule itself."""
        first = after = ""
        for field, is_needed in reversed(fields):
            name = self._add(f'"," {field} {after}' if after else f'"," {field}')
            start = self._add(f"{field} {after}".strip())
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
            pattern = pattern_rule(schema)
            return f"{self._rule}_string" if pattern is None else f"{self._quote} {pattern} {self._quote}"
        if kind == "object":
            return f'"{{" {self._fields(schema)} "}}"'
        if kind == "array":
            return self._items(schema)
        if kind in ("integer", "number", "boolean", "null"):
            return self._add(json_rule(schema))
        return f"{self._rule}_value"  # of no kind, or of one that stands elsewhere: any

    def _items(self, schema: Schema) -> str:
        item = self._add(self._value(schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if type(least) is not int or least < 0:
            least = 0
        further = f"{{{max(least - 1, 0)},{most - 1 if type(most) is int else ''}}}"
        if most == 0:
            return '"[" "]"'
        return f'"[" ({item} ("," {item}){further}){"" if least else "?"} "]"'

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            return f"{self._quote} {lark_text(value)} {self._quote}"
        return lark_text(json.dumps(value))
