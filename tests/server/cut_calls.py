"""What must hold of an answer with tools that reached its limit, wherever that was: through chat and responses, whole
and streamed. The oracle is the client's own reading of streams."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from openai import OpenAI

MARKUP = ("<", ">", "[", "{", "tool_call", "python_tag", "TOOL_CALLS", "ARGS", "name")


def check_cut_answers(client: OpenAI, question: str, limits: Iterable[int], tools: list[Any], choice: Any) -> int:
    """Returns how many of the answers have a call."""
    num_with_calls = 0
    functions = [{key: tool[key] for key in ("name", "description", "parameters") if key in tool} for tool in tools]
    nested: Any = [{"type": "function", "function": function} for function in functions]
    named: Any = choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice["name"]}}
    for limit in limits:
        options: Any = {
            "model": "scripted",
            "messages": [{"role": "user", "content": question}],
            "tools": nested,
            "tool_choice": named,
            "max_tokens": limit,
            "temperature": 0,
            "seed": 3,
        }
        answer = client.chat.completions.create(**options).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in answer.message.tool_calls or []]
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict)
        assert not any(mark in (answer.message.content or "") for mark in MARKUP), answer
        assert answer.finish_reason == "length" or (answer.finish_reason == "tool_calls" and calls)
        with client.chat.completions.stream(**options) as stream:
            chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk" and event.chunk.choices]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == (answer.message.content or "")
        assert chunks[-1].finish_reason == answer.finish_reason
        assert _whole(_joined(chunks)) == calls
        num_with_calls += bool(calls)
        _check_response(client, question, limit, tools, choice, calls)
    return num_with_calls


def _joined(chunks: list[Any]) -> list[tuple[str, str]]:
    names: list[str] = []
    arguments: list[str] = []
    for call in (call for chunk in chunks for call in chunk.delta.tool_calls or []):
        if call.index == len(names):
            names.append(call.function.name)
            arguments.append("")
        arguments[call.index] += call.function.arguments
    return list(zip(names, arguments, strict=True))


def _whole(calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Those a client could run: the last may have been begun, and is no JSON then."""
    whole = []
    for index, (name, arguments) in enumerate(calls):
        assert arguments.startswith("{")
        try:
            json.loads(arguments)
        except ValueError:
            assert index == len(calls) - 1
        else:
            whole.append((name, arguments))
    return whole


def _check_response(
    client: OpenAI, question: str, limit: int, tools: list[Any], choice: Any, calls: list[tuple[str, str]]
) -> None:
    options: Any = {
        "model": "scripted",
        "input": question,
        "tools": tools,
        "tool_choice": choice,
        "max_output_tokens": limit,
        "temperature": 0,
        "extra_body": {"seed": 3},
    }
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True))
    for final in (whole, events[-1].response):
        found = [(item.name, item.arguments) for item in final.output if item.type == "function_call"]
        assert found == calls
        assert all(item.status == "completed" for item in final.output if item.type == "function_call")
        assert not any(mark in final.output_text for mark in MARKUP)
        if final.status == "incomplete":
            assert final.incomplete_details.reason == "max_output_tokens"
    assert whole.status == events[-1].response.status
    opened = [event.output_index for event in events if event.type == "response.output_item.added"]
    closed = [event for event in events if event.type == "response.output_item.done"]
    assert opened == [event.output_index for event in closed]
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [arguments for _, arguments in calls]
    unfinished = [event.item for event in closed if event.output_index >= len(events[-1].response.output)]
    assert all(item.type == "function_call" and item.status == "incomplete" for item in unfinished)
