"""Tools and reasoning through the server with real clients. SmolLM2 rarely calls a tool of its own accord, so calls are
required of it, or written for it by a grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import RunningServer, running_server

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"],
        "additionalProperties": False,
        "$defs": {"unit": {"enum": ["C", "F"]}},
    },
    "roll_dice": {
        "type": "object",
        "properties": {"sides": {"enum": [4, 6, 20]}},
        "required": ["sides"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
CALL = '<tool_call>\n{"name": "roll_dice", "arguments": {"sides": 6}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.id.startswith("call_") and call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_required_call_is_made(client: OpenAI, temperature: float) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=temperature,
        seed=2,
        max_tokens=100,
        n=2,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        check_calls(choice.message.tool_calls)
        assert len(choice.message.tool_calls) == 1


def test_a_named_call_is_streamed(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "smollm2",
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "temperature": 0,
        "max_tokens": 100,
        "extra_body": {"speculation": "off"},  # what a grammar forces would come in one piece
    }
    whole = client.chat.completions.create(**options).choices[0].message.tool_calls[0].function
    assert whole.name == "get_weather"
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert calls[0].function.name == "get_weather" and calls[0].id and calls[0].type == "function"
    assert all(call.id is None and call.function.name is None for call in calls[1:])
    assert len(calls) > 4  # arguments came in pieces
    assert "".join(call.function.arguments for call in calls) == whole.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"


def test_a_call_that_the_model_chose_to_make_is_found(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 60, "temperature": 0}
    body["structured_outputs"] = {"choice": ["Well. " + CALL]}
    choice = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == "Well."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "roll_dice", "arguments": '{"sides": 6}'}
    assert choice["finish_reason"] == "tool_calls"
    for off in ({"tool_choice": "none"}, {"tools": None}):
        message = server.post("/v1/chat/completions", body | off).json()["choices"][0]["message"]
        assert message["content"] == "Well. " + CALL and "tool_calls" not in message


def test_a_format_of_texts_beside_a_required_call(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
    choice = server.post(
        "/v1/chat/completions", body | {"max_tokens": 80, "temperature": 0, "parallel_tool_calls": False}
    ).json()
    assert choice["choices"][0]["finish_reason"] == "tool_calls", choice


def test_a_conversation_with_calls_and_results(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "roll_dice", "arguments": '{"sides": 6}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    ]
    answer = client.chat.completions.create(model="smollm2", messages=messages, tools=TOOLS, max_tokens=8)
    longer = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=8)
    assert answer.usage.prompt_tokens > longer.usage.prompt_tokens + 50  # it was told of the tools


def test_langchain_binds_tools(server: RunningServer) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(model="smollm2", base_url=server.base_url, api_key=SecretStr("none"), temperature=0)
    bound = chat.bind_tools(TOOLS, tool_choice="roll_dice")
    assert bound.invoke("Roll a die.").tool_calls[0]["args"]["sides"] in (4, 6, 20)


FUNCTION = TOOLS[1]["function"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": [1]}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": "x"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "strig"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {
                "messages": [
                    *MESSAGES,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_refusals_name_the_field(server: RunningServer, fields: dict[str, object], param: str) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.fixture(scope="module")
def thinker(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    options = (*MODEL_OPTIONS, "--reasoning-parser", "think", "--tool-parser", "hermes")
    with running_server(tmp_path_factory.mktemp("thinker") / "log", *options) as running:
        yield OpenAI(base_url=running.base_url, api_key="none", max_retries=0)


def test_thoughts_are_split_off_and_counted(thinker: OpenAI) -> None:
    text = f"<think>\nLet me think.\n</think>\n\nWell. {CALL}"
    options: dict[str, Any] = {
        "model": "smollm2",
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 90,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": [text]}},
    }
    answer = thinker.chat.completions.create(**options)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("Let me think.", "Well.")
    check_calls(message.tool_calls)
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert 4 <= thought < answer.usage.completion_tokens - 10
    stream = thinker.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Let me think."
    assert "".join(delta.content or "" for delta in deltas) == "Well."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == thought
