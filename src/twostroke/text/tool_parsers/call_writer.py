"""Calls as a model of a format writes them: to show one to a model whose template does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.text.tool_parsers.call_grammar import literal_style
from twostroke.text.tool_parsers.formats import NAME_PREFIX, ToolFormat

Call = tuple[str, Any]
"""A name, and arguments: an object, or whatever else a client says they were."""


def written(tool_format: ToolFormat, calls: Sequence[Call]) -> str:
    block = ("", "") if tool_format.wrapper is None or tool_format.begins_bare else tool_format.wrapper
    before, behind = (f"{block[0]}[", f"]{block[1]}") if tool_format.is_list else block
    separator = ", " if tool_format.is_list else tool_format.separator
    texts = [
        f"{tool_format.opening}{_body(tool_format, index, name, arguments)}{tool_format.closing}"
        for index, (name, arguments) in enumerate(calls)
    ]
    if tool_format.wraps_each:
        return separator.join(f"{before}{text}{behind}" for text in texts)
    return f"{before}{separator.join(texts)}{behind}"


def _body(tool_format: ToolFormat, index: int, name: str, arguments: object) -> str:
    if not tool_format.is_named:
        return json.dumps({"name": name, tool_format.arguments_key: arguments})
    if tool_format.is_numbered:
        name = f"{NAME_PREFIX}{name}:{index}"
    return f"{name}{tool_format.after_name}{_arguments(tool_format, arguments)}"


def _arguments(tool_format: ToolFormat, arguments: object) -> str:
    if not isinstance(arguments, Mapping):
        return json.dumps(arguments)
    if tool_format.tags is not None:
        return tool_format.tags.arguments(arguments)
    if (style := literal_style(tool_format)) is not None:
        return style.arguments(arguments)
    return json.dumps(arguments)
