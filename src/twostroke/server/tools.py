"""Tools in a request: what was given, checked; what the model's template is told; and, where a call is required,
the grammar that sees to it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from twostroke.server.errors import bad_request
from twostroke.server.schemas import ChatBody, ResponsesBody
from twostroke.server.structured import Named, as_json
from twostroke.text.tokenizer import Tokenizer
from twostroke.text.tool_parsers.formats import ToolFormat

MAX_TOOLS = 128
MAX_NAME_CHARS = 64
FUNCTION_FIELDS = ("name", "description", "parameters")


@dataclass(frozen=True, slots=True)
class ToolRequest:
    tools: list[dict[str, Any]]
    """As the template is given them; empty: the model is told of none."""
    grammar: Named | None = None

    @property
    def is_on(self) -> bool:
        return bool(self.tools)


def tool_request(body: ChatBody | ResponsesBody, tool_format: ToolFormat, tokenizer: Tokenizer) -> ToolRequest:
    """Chat has a function's fields in an object of their own, Responses beside `type`."""
    is_nested = isinstance(body, ChatBody)
    tools = _checked(body.tools or [], is_nested)
    choice, name = _choice(body.tool_choice, bool(tools), is_nested)
    if choice == "none":
        return ToolRequest([])
    functions = [tool["function"] for tool in tools]
    if name is not None:
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise bad_request(f"tool_choice names {name!r:.80}, which is not in tools", "tool_choice")
    if choice == "auto":
        return ToolRequest(tools)
    only_one = name is not None or body.parallel_tool_calls is False
    return ToolRequest(tools, ("tools", tool_format.grammar(functions, tokenizer.special_tokens, only_one=only_one)))


def _checked(tools: list[dict[str, Any]], is_nested: bool) -> list[dict[str, Any]]:
    """As chat has them, which is how templates are given them."""
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools holds {len(tools)}; at most {MAX_TOOLS} are allowed", "tools")
    checked, names = [], set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}]"
        if tool.get("type") != "function":
            raise bad_request(f"{field}.type must be function, not {tool.get('type')!r:.60}", f"{field}.type")
        if is_nested:
            field += ".function"
            function = tool.get("function")
        else:
            function = {key: tool[key] for key in FUNCTION_FIELDS if tool.get(key) is not None}
            tool = {"type": "function", "function": function}
        if not isinstance(function, dict):
            raise bad_request(f"{field} must be an object with name and parameters", field)
        name = function.get("name")
        if not isinstance(name, str) or not _is_name(name):
            message = f"{field}.name must be 1 to {MAX_NAME_CHARS} letters, digits, dots, dashes or underscores"
            raise bad_request(message, f"{field}.name")
        if name in names:
            raise bad_request(f"{field}.name is {name!r} again", f"{field}.name")
        names.add(name)
        if not isinstance(function.get("parameters") or {}, dict):
            raise bad_request(f"{field}.parameters must be a JSON schema", f"{field}.parameters")
        as_json(field, tool)
        checked.append(tool)
    return checked


def _is_name(name: str) -> bool:
    plain = name.replace("_", "").replace("-", "").replace(".", "")
    return len(name) <= MAX_NAME_CHARS and name.isascii() and plain.isalnum()


def _choice(choice: object, has_tools: bool, is_nested: bool) -> tuple[str, str | None]:
    """`none`, `auto` or `required`, and the function's name where one is named."""
    if choice is None or choice in ("none", "auto"):
        return ("auto" if has_tools and choice != "none" else "none"), None
    name = None
    if isinstance(choice, dict):
        function = choice.get("function") if is_nested else choice
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            shape = '"function": {"name": ...}' if is_nested else '"name": ...'
            message = f'tool_choice must be none, auto, required, or {{"type": "function", {shape}}}'
            raise bad_request(message, "tool_choice")
    elif choice != "required":
        raise bad_request(f"tool_choice must be none, auto, required or a function, not {choice!r:.60}", "tool_choice")
    if not has_tools:
        raise bad_request("tool_choice needs tools", "tool_choice")
    return "required", name


# What templates read


def told_of_tools(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Messages for a template: arguments as objects, which templates write as JSON themselves. One that knows no tools
    is told of them, and of calls and results, in plain messages."""
    plain = [_with_objects(message, f"messages[{index}]") for index, message in enumerate(messages)]
    template = tokenizer.chat_template or ""
    if "tools" in template:
        return plain if _ASKS_FOR_NONE.search(template) else [_with_content(message) for message in plain]
    plain = [_as_text(message) for message in plain]
    if not tools:
        return plain
    note = _NOTE.format(tools="\n".join(json.dumps(tool) for tool in tools))
    if plain[0]["role"] == "system" and isinstance(plain[0].get("content"), str):
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{note}"}, *plain[1:]]
    return [{"role": "system", "content": note}, *plain]


_ASKS_FOR_NONE = re.compile(r"(?<!\w)content['\"\])]*\s+is\s+(not\s+)?none", re.IGNORECASE)
"""Some templates know a call by its content, which is none; others take every content for a text."""


def _with_content(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": ""} if message.get("tool_calls") and message.get("content") is None else message


_NOTE = """You may call one or more functions to help with the user's question. The functions, as JSON:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as JSON between these tags:
<tool_call>
{{"name": "the function's name", "arguments": {{}}}}
</tool_call>"""


def _with_objects(message: dict[str, Any], field: str) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list):
        raise bad_request(f"{field}.tool_calls must be a list", f"{field}.tool_calls")
    read = []
    for index, call in enumerate(calls):
        name = f"{field}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(f"{name} must be an object with a function of name and arguments", name)
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                raise bad_request(f"{name}.function.arguments must be JSON", f"{name}.function.arguments") from None
        # The name first, as models write it: a template may write the object out as it stands.
        read.append({**call, "function": {"name": function["name"], **function, "arguments": arguments}})
    return {**message, "tool_calls": read}


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [
        json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}) for call in calls
    ]
    texts = [content] if isinstance(content, str) and content else []
    texts += [f"<tool_call>\n{call}\n</tool_call>" for call in written]
    return {"role": message["role"], "content": "\n".join(texts)}
