"""Tool calls of every format that is not Hermes' through the server, with templates that render tools: calls the model
makes of its own accord, calls required of it, and conversations that go on from them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.server.custom_calls import check_allowed_tools, check_custom_calls, check_only_one
from tests.server.cut_calls import check_cut_answers
from tests.server.running import running_server
from tests.server.scripted_model import make_scripted

SCHEMAS: dict[str, Any] = {
    "roll_dice": {
        "type": "object",
        "properties": {"sides": {"enum": [4, 6, 20]}},
        "required": ["sides"],
        "additionalProperties": False,
    },
    "say": {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"enum": ["yes", "no", '"{']}, "minItems": 1, "maxItems": 3}
        },
        "required": ["words"],
        "additionalProperties": False,
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
QUESTION: Any = {"role": "user", "content": "Roll a die."}
IDS = {"llama3": r"call_[0-9a-f]{24}", "mistral": r"[0-9a-zA-Z]{9}", "mistral-args": r"[0-9a-zA-Z]{9}"}
IDS |= dict.fromkeys(("gemma4", "minimax"), IDS["llama3"])


SELDOM = ("mistral-args", "gemma4", "minimax")
"""Each needs a server of its own; `tests/text/test_tool_parsers.py` has them all, without one."""


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow if name in SELDOM else ()) for name in IDS]
)
def tool_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(tool_format: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp(tool_format)
    model = make_scripted(folder / "model", tool_format)
    with running_server(folder / "log", str(model), "--backend", "reference", "--name", "scripted") as running:
        yield OpenAI(base_url=running.base_url, api_key="none", max_retries=0, timeout=120)


def check(name: str, arguments: str) -> None:
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_a_call_of_its_own_accord(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=[QUESTION], tools=TOOLS)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "roll_dice"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"sides": 6}
    response = client.responses.create(model="scripted", input=[QUESTION], tools=FLAT_TOOLS)
    assert [item.type for item in response.output] == ["function_call"]
    assert response.usage.input_tokens == answer.usage.prompt_tokens
    untold = client.chat.completions.create(model="scripted", messages=[QUESTION], max_tokens=1)
    assert answer.usage.prompt_tokens > untold.usage.prompt_tokens + 100  # the template renders tools


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_required_calls_in_a_stream(client: OpenAI, tool_format: str, temperature: float) -> None:
    stream = client.chat.completions.create(
        model="scripted",
        messages=[QUESTION],
        tools=TOOLS,
        tool_choice="required",
        temperature=temperature,
        n=4,
        seed=7,
        stream=True,
    )
    calls: dict[tuple[int, int], list[str]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            assert not choice.delta.content
            assert choice.finish_reason in (None, "tool_calls")
            for call in choice.delta.tool_calls or []:
                written = calls.setdefault((choice.index, call.index), [])
                assert (call.id is not None) == (not written)
                written += [call.function.name or "", call.function.arguments]
    assert {sample for sample, _ in calls} == {0, 1, 2, 3}
    for written in calls.values():
        check(written[0], "".join(written[1:]))
    if tool_format == "llama3":
        assert {number for _, number in calls} == {0}


def test_a_named_call_in_responses(client: OpenAI) -> None:
    choice: Any = {"type": "function", "name": "say"}
    with client.responses.stream(model="scripted", input="Speak.", tools=FLAT_TOOLS, tool_choice=choice) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        call = stream.get_final_response().output[0]
    assert call.type == "function_call" and call.name == "say" and call.arguments == "".join(deltas)
    check("say", call.arguments)


def test_custom_tools(client: OpenAI) -> None:
    check_custom_calls(client)


def test_allowed_tools_and_no_second_call(client: OpenAI) -> None:
    check_allowed_tools(client, TOOLS, "say")
    check_only_one(client, TOOLS)


ROLL: Any = {"type": "function", "name": "roll_dice"}


def test_an_answer_cut_anywhere_has_whole_calls_alone(client: OpenAI) -> None:
    """Calls of its own accord at every token, and required ones at some: each is many tokens long here."""
    assert 1 <= check_cut_answers(client, "Roll a die.", range(1, 8), FLAT_TOOLS, "auto") < 7
    assert 1 <= check_cut_answers(client, "Hi.", [1, 9, 30, 38, 44, 50, 58, 72], FLAT_TOOLS, ROLL) < 8


@pytest.mark.slow
def test_required_calls_cut_at_every_token(client: OpenAI) -> None:
    assert 1 <= check_cut_answers(client, "Hi.", range(1, 80), FLAT_TOOLS, ROLL) < 80


def test_a_conversation_goes_on(client: OpenAI, tool_format: str) -> None:
    """Templates are strict about calls that come back: one at a time, ids of nine characters."""
    message = client.chat.completions.create(model="scripted", messages=[QUESTION], tools=TOOLS).choices[0].message
    call = message.tool_calls[0]
    assert re.fullmatch(IDS[tool_format], call.id)
    messages: list[Any] = [QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    again = client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS)
    response = client.responses.create(model="scripted", input=[QUESTION], tools=FLAT_TOOLS)
    items: list[Any] = [QUESTION, *response.output]
    items.append({"type": "function_call_output", "call_id": response.output[0].call_id, "output": "4"})
    after = client.responses.create(model="scripted", input=items, tools=FLAT_TOOLS)
    assert after.output[0].type == "function_call"  # it is all this model knows
    assert after.usage.input_tokens == again.usage.prompt_tokens > response.usage.input_tokens
