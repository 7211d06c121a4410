"""Custom tools, allowed tools and single calls, held against the real client in whichever format the model writes."""

from __future__ import annotations

import json
import re
from typing import Any

from openai import OpenAI

LARK = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9]/'
FORMATS: dict[str, Any] = {
    "shell": None,
    "dial": {"syntax": "regex", "definition": r'[0-9]{3}-"[0-9]{4}"'},
    "calculate": {"syntax": "lark", "definition": LARK},
}
FITS = {"shell": r"(?s).*", "dial": r'[0-9]{3}-"[0-9]{4}"', "calculate": r"[1-9](\+[1-9])*"}


BIAS = {"1": 4}
"""Towards a quotation mark, so that a free text ends."""


def tool(name: str, is_nested: bool) -> Any:
    """In chat's shape or in that of responses."""
    grammar = FORMATS[name]
    if is_nested:
        wanted = {"type": "text"} if grammar is None else {"type": "grammar", "grammar": grammar}
        return {"type": "custom", "custom": {"name": name, "description": f"To {name}.", "format": wanted}}
    wanted = {"type": "text"} if grammar is None else {"type": "grammar", **grammar}
    return {"type": "custom", "name": name, "description": f"To {name}.", "format": wanted}


def check_custom_calls(client: OpenAI) -> None:
    for name in FORMATS:
        seed = 5
        options: Any = {"model": "scripted", "max_tokens": 150, "seed": seed, "temperature": 0.7, "logit_bias": BIAS}
        question: Any = {"role": "user", "content": "Hi."}
        choice: Any = {"type": "custom", "custom": {"name": name}}
        tools = [tool(other, True) for other in FORMATS]
        whole = client.chat.completions.create(messages=[question], tools=tools, tool_choice=choice, **options)
        assert whole.choices[0].finish_reason == "tool_calls" and not whole.choices[0].message.content
        (call,) = whole.choices[0].message.tool_calls
        assert call.type == "custom" and call.custom.name == name
        assert re.fullmatch(FITS[name], call.custom.input), call
        _check_chat_stream(client, options | {"messages": [question], "tools": tools, "tool_choice": choice}, call)
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        messages = [question, whole.choices[0].message, result]
        after = client.chat.completions.create(messages=messages, tools=tools, **(options | {"max_tokens": 1}))
        items = _check_responses(client, name, call.custom.input, seed)
        flat = [tool(other, False) for other in FORMATS]
        again = client.responses.create(model="scripted", input=items, tools=flat, max_output_tokens=1)
        assert again.usage.input_tokens == after.usage.prompt_tokens


def _check_chat_stream(client: OpenAI, options: Any, call: Any) -> None:
    chunks = list(client.chat.completions.create(**options, stream=True))
    found = [delta for chunk in chunks for delta in (chunk.choices[0].delta.tool_calls or [] if chunk.choices else [])]
    assert [(delta.type, delta.index, delta.custom) for delta in found] == [  # type: ignore[attr-defined]
        ("custom", 0, {"name": call.custom.name, "input": call.custom.input})
    ]
    assert not any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)


def _check_responses(client: OpenAI, name: str, wanted: str, seed: int) -> list[Any]:
    """Returns the conversation, with the call's result."""
    options: Any = {
        "model": "scripted",
        "input": "Hi.",
        "tools": [tool(other, False) for other in FORMATS],
        "tool_choice": {"type": "custom", "name": name},
        "max_output_tokens": 150,
        "temperature": 0.7,
        "extra_body": {"seed": seed, "logit_bias": BIAS},
    }
    whole = client.responses.create(**options)
    call = whole.output[-1]
    assert call.type == "custom_tool_call" and (call.name, call.input) == (name, wanted)
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response().output[-1]
    assert (final.name, final.input) == (name, wanted)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    done = [event.input for event in events if event.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == wanted and done == [wanted]
    opened = [event.item for event in events if event.type == "response.output_item.added"][-1]
    assert opened.type == "custom_tool_call" and opened.input == ""
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    return [{"role": "user", "content": "Hi."}, *whole.output, result]


def check_allowed_tools(client: OpenAI, tools: list[Any], allowed: str) -> None:
    """Whatever it would do of its own accord, it calls the allowed tool or none; and is told of all."""
    names = [{"type": "function", "function": {"name": allowed}}]
    question: Any = {"role": "user", "content": "Roll a die."}
    told = client.chat.completions.create(model="scripted", messages=[question], tools=tools, max_tokens=1).usage
    for mode in ("required", "auto"):
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        answer = client.chat.completions.create(
            model="scripted", messages=[question], tools=tools, tool_choice=choice, max_tokens=300, seed=1
        )
        calls = answer.choices[0].message.tool_calls or []
        assert {call.function.name for call in calls} <= {allowed} and (calls or mode == "auto")
        assert answer.usage.prompt_tokens == told.prompt_tokens
        flat: Any = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": allowed}]}
        flat_tools: Any = [{"type": "function", **tool["function"]} for tool in tools]
        response = client.responses.create(
            model="scripted", input=[question], tools=flat_tools, tool_choice=flat, max_output_tokens=300
        )
        found = {item.name for item in response.output if item.type == "function_call"}
        assert found <= {allowed} and (found or mode == "auto")


def check_only_one(client: OpenAI, tools: list[Any]) -> None:
    question: Any = {"role": "user", "content": "Roll a die."}
    for choice in ("required", "auto"):
        answer = client.chat.completions.create(
            model="scripted",
            messages=[question],
            tools=tools,
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            temperature=1.5,
            n=6,
            seed=2,
            max_tokens=200,
        )
        for sample in answer.choices:
            calls = sample.message.tool_calls or []
            assert len(calls) <= 1 and (calls or choice == "auto" or sample.finish_reason == "length")
            assert all(isinstance(json.loads(call.function.arguments), dict) for call in calls)
