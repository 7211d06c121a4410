"""What a model's template is told of tools, of thoughts, of calls and of their results; and those whose template knows
no tools."""

from __future__ import annotations

import json
import re
from typing import Any

from twostroke.server.custom_tools import called_with
from twostroke.server.errors import bad_request
from twostroke.server.told_turns import with_calls, with_thoughts, without_nothing
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.call_writer import written
from twostroke.text.tool_parsers.formats import NAME_PREFIX, ToolFormat


def told_of_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], tokenizer: Tokenizer, tool_format: ToolFormat
) -> list[dict[str, Any]]:
    """Messages for a template: arguments as objects, which templates write as JSON themselves. One that knows no tools
    is told of them in a plain message, and of calls and results too. One that knows tools and no calls is given each
    call as part of what was said."""
    plain = [_with_objects(without_nothing(message), f"messages[{index}]") for index, message in enumerate(messages)]
    template = tokenizer.chat_template or ""
    plain = with_thoughts(plain, template)
    if "tool_calls" not in template:
        plain = [_with_written_calls(message, tool_format) for message in plain]
    if "tools" in template or "tool_calls" in template:
        plain = numbered(plain) if tool_format.is_numbered else plain
        if _ADDS_ARGUMENTS.search(template):
            plain = [_with_texts(message) for message in plain]
        if not _ASKS_FOR_NONE.search(template):
            plain = [_with_content(message) for message in plain]
        plain = with_calls(plain, template)
    else:
        plain = [_as_text(message) for message in plain]
    if not tools or "tools" in template:
        return plain
    example = written(tool_format, [("function_name", {"argument": "value"})])
    note = _NOTE.format(tools="\n".join(json.dumps(tool) for tool in tools), example=example)
    if plain[0]["role"] == "system" and isinstance(plain[0].get("content"), str):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{note}"}, *plain[1:]]
    return [{"role": "system", "content": note}, *plain]


def numbered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls named as the model names them, `functions.NAME:0` and on through the conversation, and results by that:
    such a template takes a call's name from its id, whatever a client calls it."""
    names: dict[str | None, str] = {}
    told, number = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            name = f"{NAME_PREFIX}{call['function']['name']}:{number}"
            names[call.get("id")] = name
            calls.append({**call, "id": name})
            number += 1
        if calls:
            message = {**message, "tool_calls": calls}
        elif (call_id := message.get("tool_call_id")) in names:
            message = {**message, "tool_call_id": names[call_id]}
        told.append(message)
    return told


_ADDS_ARGUMENTS = re.compile(
    r"""arguments(?:['"]\])?\s*\+ | \+\s*[\w.'"\[\]]*\barguments(?:['"]\])?\s*(?:\+|-?[%}])""", re.VERBOSE
)
"""A template that joins arguments to a text takes them for one."""
_ASKS_FOR_NONE = re.compile(r"(?<!\w)content['\"\])]*\s+is\s+(not\s+)?none", re.IGNORECASE)
"""Some templates know a call by its content, which is none; others take every content for a text."""


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message.get("tool_calls") and message.get("content") is None else message


_NOTE = """You may call one or more functions to help with the user's question. The functions, as JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments in this form:
{example}"""


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _with_objects(message: dict[str, Any], field: str) -> dict[str, Any]:
    _check_id(message.get("tool_call_id"), f"{field}.tool_call_id")
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise bad_request(f"{field}.tool_calls must be a list", f"{field}.tool_calls")
    read = []
    for index, call in enumerate(calls):
        name = f"{field}.tool_calls[{index}]"
        if isinstance(call, dict) and call.get("type") == "custom":
            call = _custom_call(call, name)
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{name} must be an object with a function of name and arguments", name)
        _check_id(call.get("id"), f"{name}.id")
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise bad_request(f"{name}.function.arguments must be JSON", f"{name}.function.arguments") from None
        # The name first, as models write it: a template may write the object out as it stands.
        read.append({**call, "function": {"name": function["name"], **function, "arguments": arguments}})
    return {**message, "tool_calls": read}


def _check_id(found: object, field: str) -> None:
    if not isinstance(found, str | None):
        raise bad_request(f"{field} must be a string", field)


def _custom_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """As the function that stands for the tool is called."""
    custom = call.get("custom")
    if not isinstance(custom, dict) or not all(isinstance(custom.get(key), str) for key in ("name", "input")):
        raise bad_request(f"{field}.custom must be an object with name and input", f"{field}.custom")
    plain = {key: value for key, value in call.items() if key != "custom"}
    return {**plain, "type": "function", "function": called_with(custom["name"], custom["input"])}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message.get('content')}\n</tool_response>"}


def _with_written_calls(message: dict[str, Any], tool_format: ToolFormat) -> dict[str, Any]:
    """As the model would write them, behind what it said."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    content = message.get("content")
    texts = [content] if isinstance(content, str) and content else []
    texts.append(written(tool_format, [(call["function"]["name"], call["function"]["arguments"]) for call in calls]))
    plain = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**plain, "content": "\n".join(texts)}
