"""`/v1/responses` with tools: calls that are required, chosen, allowed, cut and custom, beside formats of text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

from tests.server.custom_calls import check_allowed_tools, check_custom_calls, check_only_one
from tests.server.cut_calls import check_cut_answers
from tests.server.response_cases import (
    ASKED,
    ROLL,
    THOUGHT,
    TOOLS,
    TOOLS_ROLL,
    Cat,
    Roll,
    check_events,
    shown,
    streamed,
)


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "roll_dice"}])
def test_a_required_call_comes_after_the_thought(scripted: OpenAI, question: str, choice: Any) -> None:
    tools = [ROLL, TOOLS[1]]  # the first is for the scripted, which sends it as the others are
    options: Any = {"input": question, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    whole = scripted.responses.parse(model="scripted", **options)
    events, final = streamed(scripted, **options)
    check_events(events, final)
    for answer in (whole, final):
        assert shown(answer.output)[0] == ("reasoning", THOUGHT)
        assert [item.type for item in answer.output[1:]] == ["function_call"]
        call = answer.output[1]
        assert call.call_id.startswith("call_") and call.id.startswith("fc_")
        if call.name == "roll_dice":
            assert isinstance(call.parsed_arguments, Roll)
        else:
            assert choice == "required" and json.loads(call.arguments) == {}
    if choice != "required":
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert len(deltas) > 1  # arguments came in pieces
        assert deltas[-1].snapshot == final.output[1].arguments


def test_a_format_of_texts_beside_a_required_call(scripted: OpenAI) -> None:
    """As instructor sends both: the format is for a message, and there will be a call."""
    text: Any = {"format": {"type": "json_schema", "name": "cat", "schema": Cat.model_json_schema()}}
    answer = scripted.responses.create(model="scripted", input="Hi.", tools=TOOLS, tool_choice=TOOLS_ROLL, text=text)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert Roll.model_validate_json(answer.output[1].arguments)


def test_several_calls_in_one_answer(scripted: OpenAI) -> None:
    for _ in range(20):  # it tosses a coin for another call
        events, final = streamed(scripted, input="Hi.", tools=TOOLS, tool_choice="required")
        check_events(events, final)
        ids = [item.call_id for item in final.output if item.type == "function_call"]
        assert len(set(ids)) == len(ids) == len(final.output) - 1
        if len(ids) > 1:
            return
    raise AssertionError("there was never more than one call")


def test_a_call_that_the_model_chose_to_make(scripted: OpenAI) -> None:
    options: Any = {"input": "Roll!", "tools": TOOLS}
    whole = scripted.responses.create(model="scripted", **options)
    assert shown(whole.output) == [("function_call", 'roll_dice{"sides": 6}'), ("message", "Done.")]
    assert whole.tools[0].name == "roll_dice" and whole.tool_choice == "auto"
    events, final = streamed(scripted, **options)
    check_events(events, final)
    assert shown(final.output) == shown(whole.output)
    for off in ({"tool_choice": "none"}, {"tools": []}):
        answer = scripted.responses.create(model="scripted", **(options | off))
        assert shown(answer.output)[0][0] == "message" and answer.output_text.startswith("<tool_call>")


CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in TOOLS
]


def test_custom_tools(scripted: OpenAI) -> None:
    check_custom_calls(scripted)


def test_allowed_tools_and_no_second_call(scripted: OpenAI) -> None:
    check_allowed_tools(scripted, CHAT_TOOLS, "stop")
    check_only_one(scripted, CHAT_TOOLS)
    answer = scripted.responses.create(
        model="scripted", input="Roll!", tools=TOOLS, parallel_tool_calls=False, temperature=0
    )
    assert shown(answer.output) == [("function_call", 'roll_dice{"sides": 6}')]  # without what it says behind a call
    assert answer.usage.output_tokens < 10 and not answer.parallel_tool_calls
    endless = scripted.responses.create(
        model="scripted",
        input="Roll!",
        tools=TOOLS,
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=30,
        extra_body={"ignore_eos": True},
    )
    assert shown(endless.output) == shown(answer.output) and endless.usage.output_tokens == 30


def test_a_call_that_a_stop_string_cuts_is_none(scripted: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Roll!"}]
    for stop in ("name", "ides", "6}"):
        options: Any = {"model": "scripted", "messages": messages, "tools": CHAT_TOOLS, "stop": stop, "temperature": 0}
        choice = scripted.chat.completions.create(**options).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "", None)


def test_a_format_of_texts_beside_tools_leaves_both_open(scripted: OpenAI) -> None:
    """The model would roll dice of its own accord, and may: the format is for what it says instead."""
    text: Any = {"format": {"type": "json_schema", "name": "cat", "schema": Cat.model_json_schema()}}
    called = scripted.responses.create(model="scripted", input="Roll!", tools=[TOOLS[0]], text=text, temperature=0)
    assert called.output[0].type == "function_call" and Roll.model_validate_json(called.output[0].arguments)
    kinds = set()
    for seed in range(12):  # behind its thought it has no line for either, and draws
        said = scripted.responses.create(
            model="scripted", input="Hi.", tools=TOOLS, text=text, extra_body={"seed": seed}, parallel_tool_calls=False
        )
        last = said.output[-1]
        kinds.add(last.type)
        if last.type == "message":
            assert Cat.model_validate_json(said.output_text)
    assert kinds == {"message", "function_call"}


def test_an_answer_cut_anywhere_has_whole_calls_alone(scripted: OpenAI) -> None:
    assert 1 <= check_cut_answers(scripted, "Roll!", range(1, 9), TOOLS, "auto") < 8
    assert 1 <= check_cut_answers(scripted, "Hi.", [7, 16, 41, 52, 58, 68, 90], TOOLS, TOOLS_ROLL) < 7


@pytest.mark.slow
def test_required_calls_cut_at_every_token(scripted: OpenAI) -> None:
    assert 1 <= check_cut_answers(scripted, "Hi.", range(1, 90), TOOLS, TOOLS_ROLL) < 90
