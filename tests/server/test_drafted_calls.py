"""Tool calls with drafts and without, through the server and with the client that people use: the same calls, whole and
in streams, greedy and seeded, whether a grammar writes them or the model does of its own accord."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import OpenAI

from tests.server.running import RunningServer
from tests.server.test_tools import CALL, MESSAGES, TOOLS

METHODS: tuple[Any, ...] = ("auto", "suffix", {"method": "ngram", "max_drafts": 1})
WEATHER = {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'}
CONVERSATION: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": WEATHER}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "21 degrees"},
    {"role": "user", "content": "And now? Ask get_weather with Paris and C again."},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
REQUIRED: dict[str, dict[str, Any]] = {
    "greedy": {"messages": MESSAGES, "tool_choice": "required", "temperature": 0},
    "seeded, two answers": {"messages": MESSAGES, "tool_choice": "required", "temperature": 1.2, "seed": 5, "n": 2},
    "named, again": {"messages": CONVERSATION, "tool_choice": NAMED, "temperature": 0.7, "seed": 1},
    "behind a text": {"messages": MESSAGES, "temperature": 0, "structured_outputs": {"choice": ["Well. " + CALL]}},
}
"""Of SmolLM2, which calls nothing of its own accord."""


@dataclass
class Choice:
    """All that a user sees of an answer, however it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    """Names and arguments."""
    reason: str | None = None


def whole(client: OpenAI, fields: dict[str, Any], speculation: Any) -> tuple[list[Choice], int, int]:
    """The choices, the tokens of all, and how many drafts held."""
    extra = {"speculation": speculation} | {name: fields[name] for name in fields if name == "structured_outputs"}
    known = {name: value for name, value in fields.items() if name != "structured_outputs"}
    answer: Any = client.chat.completions.create(**known, extra_body=extra)
    found = []
    for choice in answer.choices:
        message = choice.message
        calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or []]
        thought = getattr(message, "reasoning_content", None) or ""
        found.append(Choice(message.content or "", thought, calls, choice.finish_reason))
    told = answer.timing["decode"]["speculation"] if len(found) == 1 else None
    return found, answer.usage.completion_tokens, 0 if told is None else told["drafts_held"]


def streamed(client: OpenAI, fields: dict[str, Any], speculation: Any) -> list[Choice]:
    extra = {"speculation": speculation} | {name: fields[name] for name in fields if name == "structured_outputs"}
    known = {name: value for name, value in fields.items() if name != "structured_outputs"}
    found = [Choice() for _ in range(fields.get("n", 1))]
    chunks: Any = client.chat.completions.create(**known, extra_body=extra, stream=True)
    for chunk in chunks:
        for choice in chunk.choices:
            own, delta = found[choice.index], choice.delta
            assert own.reason is None, "something came behind the end"
            own.content += delta.content or ""
            own.reasoning += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.index == len(own.calls):
                    assert call.id and call.function.name
                    own.calls.append([call.function.name, ""])
                else:
                    assert call.index == len(own.calls) - 1 and not call.id and not call.function.name
                own.calls[-1][1] += call.function.arguments or ""
            own.reason = choice.finish_reason
    return found


def check(client: OpenAI, fields: dict[str, Any]) -> int:
    """How many drafts held in all."""
    plain, num_tokens, held = whole(client, fields, "off")
    assert held == 0 and streamed(client, fields, "off") == plain
    for method in METHODS:
        drafted, count, held_now = whole(client, fields, method)
        assert drafted == plain and count == num_tokens, method
        assert streamed(client, fields, method) == plain, method
        held += held_now
    assert all(choice.calls and choice.reason == "tool_calls" for choice in plain)
    return held


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.mark.parametrize("name", REQUIRED)
def test_calls_that_a_grammar_writes(client: OpenAI, name: str) -> None:
    fields = {"model": "smollm2", "tools": TOOLS, "max_tokens": 100, "parallel_tool_calls": False, **REQUIRED[name]}
    held = check(client, fields)
    assert held > 10 or fields.get("n", 1) > 1, "what a grammar forces is drafted"


SAID = "Roll a die for me, please."
OWN: dict[str, dict[str, Any]] = {
    "at once": {"messages": [{"role": "user", "content": SAID}]},
    "drawn": {"messages": [{"role": "user", "content": SAID}], "temperature": 0.9, "seed": 4},
    "once more": {
        "messages": [
            {"role": "user", "content": f"Write this: {CALL}"},
            {"role": "assistant", "content": CALL},
            {"role": "user", "content": SAID},
        ]
    },
}


def test_calls_of_its_own_accord(scripted: OpenAI) -> None:
    """No grammar holds the model, and what is looked up in the conversation is a call in other letters. Whether drafts
    pay goes by the seconds that steps take: on a busy machine nobody may draft for a while."""
    fields: dict[str, Any] = {"model": "scripted", "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    rounds = (sum(check(scripted, {**fields, **own}) for own in OWN.values()) for _ in range(10))
    assert any(held > 0 for held in rounds), "drafts held"


def test_responses_with_calls(client: OpenAI) -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    told = []
    for method in ("off", *METHODS):
        extra = {"speculation": method, "temperature": 0}
        with client.responses.stream(
            model="smollm2", input=MESSAGES, tools=tools, tool_choice="required", extra_body=extra
        ) as stream:
            deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
            items: Any = stream.get_final_response().output
        assert "".join(deltas) == "".join(item.arguments for item in items)
        told.append([(item.type, item.name, item.arguments) for item in items])
    assert told[0] and all(one == told[0] for one in told)
