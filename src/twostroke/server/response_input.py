"""The input of a Responses call as messages for a chat template: what a model thought, said and called in one turn is
several items there, and one message here."""

from __future__ import annotations

import json
from typing import Any

from twostroke.server.errors import bad_request
from twostroke.server.schemas import ContentPart, InputItem, ResponsesBody
from twostroke.server.settings import Limits

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
THOUGHT_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


def input_messages(body: ResponsesBody, limits: Limits) -> list[dict[str, Any]]:
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if not 1 <= len(body.input) <= limits.max_messages:
        raise bad_request(f"input holds {len(body.input)} items; 1 to {limits.max_messages} are allowed", "input")
    return messages + _Turns().read(body.input)


class _Turns:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's, as long as it goes on
        self._thought_due = ""  # it goes with what the assistant does next
        self._names: dict[str, str] = {}  # of functions, by call id

    def read(self, items: list[InputItem]) -> list[dict[str, Any]]:
        readers = {
            "message": self._message,
            "reasoning": self._thought,
            "function_call": self._call,
            "function_call_output": self._result,
        }
        for index, item in enumerate(items):
            field = f"input[{index}]"
            if item.type not in readers:
                kinds = ", ".join(readers)
                raise bad_request(f"{field}.type must be one of {kinds}, not {item.type!r}", f"{field}.type")
            readers[item.type](item, field)
        return self._messages

    def _message(self, item: InputItem, field: str) -> None:
        if item.role is None or item.content is None:
            raise bad_request(f"{field} must be a message with role and content", field)
        kinds = TEXT_PARTS | {"refusal"} if item.role == "assistant" else TEXT_PARTS
        text = _text_of(item.content, f"{field}.content", kinds)
        if item.role == "assistant":
            self._begin_turn(text)
        else:
            self._end_turn({"role": "system" if item.role == "developer" else item.role, "content": text})

    def _thought(self, item: InputItem, field: str) -> None:
        name = "content" if item.content else "summary"
        self._turn = None
        self._thought_due = _text_of(item.content or item.summary or "", f"{field}.{name}", THOUGHT_PARTS)

    def _call(self, item: InputItem, field: str) -> None:
        if item.call_id is None or item.name is None or item.arguments is None:
            raise bad_request(f"{field} must be a function call with call_id, name and arguments", field)
        try:
            arguments = json.loads(item.arguments or "{}")
        except (ValueError, RecursionError):
            raise bad_request(f"{field}.arguments must be JSON", f"{field}.arguments") from None
        self._names[item.call_id] = item.name
        turn = self._turn if self._turn is not None else self._begin_turn(None)
        function = {"name": item.name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})

    def _result(self, item: InputItem, field: str) -> None:
        if item.call_id is None or item.output is None:
            raise bad_request(f"{field} must be a call's result with call_id and output", field)
        name = self._names.get(item.call_id)
        if name is None:
            message = f"{field}.call_id is {item.call_id!r:.80}, and no function_call before it has that call_id"
            raise bad_request(message, f"{field}.call_id")
        text = _text_of(item.output, f"{field}.output", TEXT_PARTS)
        self._end_turn({"role": "tool", "tool_call_id": item.call_id, "name": name, "content": text})

    def _begin_turn(self, content: str | None) -> dict[str, Any]:
        self._turn = {"role": "assistant", "content": content}
        if self._thought_due:
            self._turn["reasoning_content"], self._thought_due = self._thought_due, ""
        self._messages.append(self._turn)
        return self._turn

    def _end_turn(self, message: dict[str, Any]) -> None:
        self._turn, self._thought_due = None, ""
        self._messages.append(message)


def _text_of(content: str | list[ContentPart], name: str, kinds: frozenset[str]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in kinds or text is None:
            raise bad_request(f"{name}[{index}] must be text, not {part.type!r:.60}", f"{name}[{index}]")
        texts.append(text)
    return "\n".join(texts)
