"""Turns as a template reads them, where templates differ from what clients send: under which name a thought stands,
where results stand, and how many calls a message may have. What a template reads is seen from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from twostroke.text import harmony
from twostroke.text.chat_template import check_messages

Message = dict[str, Any]

OTHER_NAMES = ("thinking", "reasoning")
"""Of a thought, where a template does not know `reasoning_content`."""
_OPTIONAL = ("tool_calls", "reasoning_content", "reasoning", "thinking", "name", "tool_call_id")
_RESULTS_FIELD = "tool_responses"
_FIRST_CALL = re.compile(r"tool_calls['\"\])]*\s*(?:\[\s*0\s*\]|\|\s*first\b)")
_EACH_CALL = re.compile(r"\bin\s+\(?[\w.\[\]'\"]*\btool_calls\b")
_ROLE_OF_RESULTS = re.compile(r"role['\"\])]*\s*[=!]=\s*['\"]tool['\"]")


def without_nothing(message: Message) -> Message:
    """Clients write null, or an empty list, where there is nothing. Templates ask whether a field is there."""
    return {name: value for name, value in message.items() if name not in _OPTIONAL or value not in (None, [])}


def with_thoughts(messages: Sequence[Message], template: str) -> list[Message]:
    """With each thought under the name that the template reads."""
    messages = [_with_own_name(message) for message in messages]
    if harmony.CHANNEL in template:
        return [_harmony_turn(message) for message in messages]
    if "reasoning_content" in template:
        return messages
    names = [name for name in OTHER_NAMES if re.search(rf"(?:\.|\[['\"]|get\(['\"]){name}\b", template)]
    return [_with_names(message, names) for message in messages]


def with_calls(messages: list[Message], template: str) -> list[Message]:
    """With calls and results where the template looks for them. Each result keeps its text."""
    if _FIRST_CALL.search(template) and not _EACH_CALL.search(template):
        return [told for turn, results in _rounds(messages) for told in _one_by_one(turn, results)]
    if _RESULTS_FIELD in template and not _ROLE_OF_RESULTS.search(template):
        return _with_responses(check_messages(messages))
    return messages


def _with_own_name(message: Message) -> Message:
    """A thought may come as `reasoning`, which other servers call it."""
    other = message.get("reasoning")
    is_other = isinstance(other, str) and other and not message.get("reasoning_content")
    return {**message, "reasoning_content": other} if is_other else message


def _with_names(message: Message, names: Sequence[str]) -> Message:
    thought = message.get("reasoning_content")
    return message if not thought else {**dict.fromkeys(names, thought), **message}


def _harmony_turn(message: Message) -> Message:
    """As gpt-oss's template reads it: a thought before a call is `thinking`, and a call has no content beside that."""
    thought = message.get("reasoning_content")
    if not message.get("tool_calls") or not thought or message.get("thinking"):
        return message
    content = message.get("content")
    whole = f"{thought}\n\n{content}" if isinstance(content, str) and content else thought
    return {**message, "thinking": whole, "content": None}


def _rounds(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Each message, with the results of its calls where it has some."""
    index = 0
    while index < len(messages):
        turn, results = messages[index], []
        index += 1
        while turn.get("tool_calls") and index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        yield turn, results


def _one_by_one(turn: Message, results: list[Message]) -> list[Message]:
    """A message for each call, its results behind it: such a template takes a result for the last call's."""
    calls = turn.get("tool_calls") or []
    if len(calls) < 2:
        return [turn, *results]
    owners = _owners(calls, results)
    told = []
    for number, call in enumerate(calls):
        said = turn if number == 0 else {"role": turn["role"], "content": ""}
        own = [result for result, owner in zip(results, owners, strict=True) if owner == number]
        told += [{**said, "tool_calls": [call]}, *own]
    return told


def _owners(calls: Sequence[Message], results: Sequence[Message]) -> list[int]:
    """Of each result the number of its call: by id, or else the first call without a result, or else the last."""
    ids = [call.get("id") for call in calls]
    named = [ids.index(found) if (found := result.get("tool_call_id")) in ids else None for result in results]
    free = iter([number for number in range(len(calls)) if number not in named])
    return [next(free, len(calls) - 1) if owner is None else owner for owner in named]


def _with_responses(messages: Sequence[Message]) -> list[Message]:
    """Gemma 4's manner: results, and the answer that follows them, belong to the message that called. That one's own
    words come first, as a message of their own: the template would put them behind the results."""
    told: list[Message] = []
    for turn, results in _rounds(messages):
        last = told[-1] if told else {}
        if turn["role"] == "tool":  # of a call that is not in the conversation
            told.append({"role": "assistant", "content": "", _RESULTS_FIELD: [_response(turn, None)]})
        elif results:
            if turn.get("content"):
                told.append({"role": turn["role"], "content": turn["content"]})
            owners = _owners(turn["tool_calls"], results)
            responses = [
                _response(result, turn["tool_calls"][owner]) for result, owner in zip(results, owners, strict=True)
            ]
            told.append({**turn, "content": "", _RESULTS_FIELD: responses})
        elif turn["role"] == "assistant" and not turn.get("tool_calls") and _is_unanswered(last):
            told[-1] = {**last, "content": turn.get("content")}
        else:
            told.append(turn)
    return told


def _is_unanswered(turn: Message) -> bool:
    return bool(turn.get(_RESULTS_FIELD)) and not turn.get("content")


def _response(result: Message, call: Message | None) -> Message:
    name = result.get("name") if call is None else call["function"]["name"]
    return ({} if name is None else {"name": name}) | {"response": result.get("content")}
