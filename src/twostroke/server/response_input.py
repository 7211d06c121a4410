"""The input of a Responses call as messages for a chat template: what a model thought, said and called in one turn is
several items there, and one message here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from twostroke.server.custom_tools import called_with
from twostroke.server.errors import ApiError, bad_request
from twostroke.server.response_store import ResponseStore, StoredItem, StoredResponse, Turn
from twostroke.server.schemas import ContentPart, InputItem, ResponsesBody
from twostroke.server.settings import Limits

TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_PREFIXES |= {"custom_tool_call": "ctc", "custom_tool_call_output": "ctco"}
THOUGHT_PARTS = frozenset({"reasoning_text", "summary_text", "text"})


@dataclass(frozen=True, slots=True)
class ResponseInput:
    messages: list[dict[str, Any]]
    items: list[InputItem]
    """The items of this call alone."""
    turns: tuple[Turn, ...]
    """The turns that this call goes on from."""
    key: int
    """The number of the API key that it belongs to."""

    def turn(self, answered: list[dict[str, Any]]) -> Turn:
        return Turn.of([_listed(item) for item in self.items], answered)


def read_input(
    body: ResponsesBody, limits: Limits, store: ResponseStore, key: int, previous: StoredResponse | None = None
) -> ResponseInput:
    """`previous`: what it goes on from, where that is known."""
    turns: tuple[Turn, ...] = ()
    earlier: list[StoredItem] = []
    if body.previous_response_id is not None:
        previous = previous or store.find(key, body.previous_response_id)
        if previous is None:
            raise response_not_found(body.previous_response_id, "previous_response_id")
        turns, earlier = previous.turns, previous.conversation()
    given = body.input
    if isinstance(given, str):
        given = [InputItem.model_validate({"role": "user", "content": given})]
    if not given or len(earlier) + len(given) > limits.max_messages:
        before = f", and {len(earlier)} come before it" if earlier else ""
        message = f"input holds {len(given)} items{before}; 1 to {limits.max_messages} are allowed in all"
        raise bad_request(message, "input")
    named = [_named(item, f"input[{index}]", store, key) for index, item in enumerate(given)]
    _check_size([*earlier, *(item for item in named if item is not None)], limits)
    items = [item if found is None else _read(found) for item, found in zip(given, named, strict=True)]
    reader = _Turns()
    reader.read(map(_read, earlier), "previous_response_id")
    messages = reader.read(items, "input")
    if body.instructions is not None:  # of this response alone: those of earlier ones are not carried on
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return ResponseInput(messages, items, turns, key)


def response_not_found(response_id: str, param: str | None = None) -> ApiError:
    reason = "it was never kept, was deleted, or had to make room for others"
    message = f"there is no response {response_id!r:.200} here: {reason}"
    return ApiError(404, message, param=param, code="response_not_found")


def _check_size(kept: list[StoredItem], limits: Limits) -> None:
    """Refuse too much: a few ids may stand for any number of long texts."""
    num_bytes = sum(len(item.text) for item in kept)
    if num_bytes > limits.max_body_bytes:
        message = f"the kept items that the input goes on from or names have {num_bytes} bytes"
        raise ApiError(413, f"{message}, and this server takes {limits.max_body_bytes}", code="body_too_large")


def _read(item: StoredItem) -> InputItem:
    return InputItem.model_validate(item.read())


def _named(item: InputItem, field: str, store: ResponseStore, key: int) -> StoredItem | None:
    """The kept item that a reference names."""
    if item.type != "item_reference":
        return None
    found = None if item.id is None else store.find_item(key, item.id)
    if found is None:
        message = f"{field}.id is {item.id!r:.80}, and no response that is kept here has such an item"
        raise ApiError(404, message, param=f"{field}.id", code="item_not_found")
    return found


def _listed(item: InputItem) -> dict[str, Any]:
    """As lists of input items have it, and nothing of it that was not read."""
    shown: dict[str, Any] = {
        "id": item.id or f"{_PREFIXES.get(item.type, 'item')}_{uuid4().hex}",
        "status": "completed",
    }
    for name in InputItem.model_fields:
        value = shown.get(name) or getattr(item, name)
        if isinstance(value, list):
            value = [part.model_dump(include={"type", "text", "refusal"}, exclude_none=True) for part in value]
        if value is not None:
            shown[name] = value
    if item.type == "message" and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": item.content}]
    return shown


class _Turns:
    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None  # the assistant's, as long as it goes on
        self._thought_due = ""  # it goes with what the assistant does next
        self._names: dict[str, str] = {}  # of functions, by call id

    def read(self, items: Iterable[InputItem], name: str) -> list[dict[str, Any]]:
        """All messages so far; `name` is the field that the items came in."""
        readers = {
            "message": self._message,
            "reasoning": self._thought,
            "function_call": self._call,
            "function_call_output": self._result,
            "custom_tool_call": self._custom_call,
            "custom_tool_call_output": self._result,
        }
        for index, item in enumerate(items):
            field = f"{name}[{index}]"
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
        self._add_call(item.call_id, {"name": item.name, "arguments": arguments})

    def _custom_call(self, item: InputItem, field: str) -> None:
        if item.call_id is None or item.name is None or item.input is None:
            raise bad_request(f"{field} must be a custom tool's call with call_id, name and input", field)
        self._add_call(item.call_id, called_with(item.name, item.input))

    def _add_call(self, call_id: str, function: dict[str, Any]) -> None:
        self._names[call_id] = function["name"]
        turn = self._turn if self._turn is not None else self._begin_turn(None)
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})

    def _result(self, item: InputItem, field: str) -> None:
        if item.call_id is None or item.output is None:
            raise bad_request(f"{field} must be a call's result with call_id and output", field)
        name = self._names.get(item.call_id)
        if name is None:
            message = f"{field}.call_id is {item.call_id!r:.80}, and no call before it has that call_id"
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
