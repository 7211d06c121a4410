"""Anthropic's messages, system prompt and tools as chat has them, which is how chat templates are given them: blocks
become messages, a turn's thought and calls become fields of one, and results become messages of their own."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter, ValidationError

from twostroke.server.anthropic_schemas import Block, CountBody, Tool, ToolChoice
from twostroke.server.errors import bad_request
from twostroke.server.schemas import ChatBody, Many, Text
from twostroke.server.settings import Limits

_RESULT: TypeAdapter[str | list[Block] | None] = TypeAdapter(Text | Many[Block] | None)
TOOL_FIELDS = {".function.parameters": ".input_schema", ".function": ""}
"""From chat's names to Anthropic's."""
_ROLES = ("user", "assistant", "system")


def template_messages(body: CountBody, limits: Limits) -> list[dict[str, Any]]:
    if len(body.messages) > limits.max_messages:
        message = f"messages holds {len(body.messages)}; at most {limits.max_messages} are allowed"
        raise bad_request(message, "messages")
    turns = _Turns()
    if body.system is not None:
        turns.system(_text_of(body.system, "system"))
    for index, turn in enumerate(body.messages):
        field = f"messages[{index}]"
        if turn.role not in _ROLES:
            raise bad_request(f"{field}.role must be one of {', '.join(_ROLES)}, not {turn.role!r}", f"{field}.role")
        if not turn.content:
            raise bad_request(f"{field}.content is empty", f"{field}.content")
        if turn.role == "system":
            turns.system(_text_of(turn.content, f"{field}.content"))
        elif isinstance(turn.content, str):
            turns.say(turn.role, turn.content)
        else:
            for number, block in enumerate(turn.content):
                turns.add(turn.role, block, f"{field}.content[{number}]")
    if body.messages[-1].role == "assistant":
        message = "messages must end with a user's turn: an answer whose beginning is given is not continued here"
        raise bad_request(message, "messages")
    return turns.messages


class _Turns:
    """Neighbours of one role are one turn, as Anthropic has it; many templates insist."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of tools, by the id of a call

    def system(self, text: str) -> None:
        if text:
            self.say("system", text)

    def add(self, role: str, block: Block, field: str) -> None:
        kind = block.type
        if kind == "text":
            if block.text is None:
                raise bad_request(f"{field}.text is missing", field)
            self.say(role, block.text)
        elif kind == "tool_result" and role == "user":
            self._result(block, field)
        elif kind == "tool_use" and role == "assistant":
            self._call(block, field)
        elif kind == "thinking" and role == "assistant":
            turn = self._turn_of(role)
            turn["reasoning_content"] = _joined(turn.get("reasoning_content"), block.thinking or "")
        elif kind != "redacted_thinking" or role != "assistant":  # that one nobody can read
            raise _unread(field, kind, f"the {role}'s turns")

    def _turn_of(self, role: str) -> dict[str, Any]:
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]

    def say(self, role: str, text: str) -> None:
        turn = self._turn_of(role)
        turn["content"] = _joined(turn["content"], text)

    def _call(self, block: Block, field: str) -> None:
        if block.id is None or block.name is None or block.input is None:
            raise bad_request(f"{field} must be a tool_use with id, name and input", field)
        self._names[block.id] = block.name
        function = {"name": block.name, "arguments": block.input}
        turn = self._turn_of("assistant")
        turn["content"] = turn["content"] or None  # some templates know a call by its having none
        turn.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})

    def _result(self, block: Block, field: str) -> None:
        if block.tool_use_id is None:
            raise bad_request(f"{field} must be a tool_result with tool_use_id", field)
        name = self._names.get(block.tool_use_id)
        if name is None:
            message = f"{field}.tool_use_id is {block.tool_use_id!r:.80}, and no tool_use before it has that id"
            raise bad_request(message, f"{field}.tool_use_id")
        try:
            content = _RESULT.validate_python(block.content, strict=True)
        except ValidationError:
            raise bad_request(f"{field}.content must be a text or blocks of text", f"{field}.content") from None
        text = "" if content is None else _text_of(content, f"{field}.content")
        if block.is_error:  # templates know no such mark
            text = f"Error: {text}" if text else "Error"
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": text})


def _joined(before: str | None, text: str) -> str:
    return f"{before}\n{text}" if before else text


def _text_of(content: str | list[Block], field: str) -> str:
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.type != "text" or block.text is None:
            raise _unread(f"{field}[{number}]", block.type, "this place")
    return "\n".join(block.text or "" for block in content)


def _unread(field: str, kind: str, place: str) -> Exception:
    reason = "this server's models read text" if kind in ("image", "document") else f"{place} cannot hold it here"
    return bad_request(f"{field} is a block of type {kind!r}: {reason}", field)


# Tools


def as_chat(body: CountBody) -> ChatBody:
    """The fields that decide on tools, as chat has them."""
    choice, is_parallel = _choice(body.tool_choice)
    return ChatBody.model_construct(
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])],
        tool_choice=choice,
        parallel_tool_calls=is_parallel,
    )


def _tool(tool: Tool, field: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"{field}.type is {tool.type!r}: tools with a name, a description and an input_schema are taken here"
        raise bad_request(message, f"{field}.type")
    if tool.input_schema is None:
        raise bad_request(f"{field}.input_schema is missing", f"{field}.input_schema")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(choice: ToolChoice | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """The choice of tools, and whether several calls in one answer are allowed, where that is said."""
    if choice is None:
        return None, None
    is_parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    words = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type in words:
        return words[choice.type], is_parallel
    if choice.type != "tool":
        message = f"tool_choice.type must be auto, any, tool or none, not {choice.type!r}"
        raise bad_request(message, "tool_choice.type")
    if choice.name is None:
        raise bad_request("tool_choice.name is missing: it names the tool", "tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}, is_parallel
