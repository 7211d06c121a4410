"""`/v1/responses` with the real client: thoughts, texts and calls as items, whole, streamed and parsed. The model
thinks before it answers, so that what it is held to begins after that."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.server.custom_calls import check_allowed_tools, check_custom_calls, check_only_one
from tests.server.cut_calls import check_cut_answers
from tests.server.running import RunningServer


class Roll(BaseModel):
    """Roll dice."""

    model_config = ConfigDict(extra="forbid")

    sides: Literal[4, 6, 20]


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mood: Literal["calm", "wild"]
    name: str = Field(max_length=5)


ROLL = openai.pydantic_function_tool(Roll, name="roll_dice")
TOOLS: list[Any] = [
    {"type": "function", **ROLL["function"]},
    {"type": "function", "name": "stop", "parameters": {"type": "object", "additionalProperties": False}},
]
TOOLS_ROLL: Any = {"type": "function", "name": "roll_dice"}
THOUGHT, TEXT = "Let me see.", "Well, well."
ASKED = ["Hello.", "Ponder this."]
"""A model that opens its thought itself, and one whose prompt has opened it."""


@pytest.fixture(scope="module")
def server(scripted_server: RunningServer) -> RunningServer:
    return scripted_server


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0).with_options(timeout=30)


def shown(items: list[Any]) -> list[tuple[str, str]]:
    """Each output item's kind and text."""
    return [
        (item.type, item.name + item.arguments if item.type == "function_call" else item.content[0].text)
        for item in items
    ]


def streamed(client: OpenAI, **options: Any) -> tuple[list[Any], Any]:
    with client.responses.stream(model="scripted", **options) as stream:
        events = list(stream)
        return events, stream.get_final_response()


def check_events(events: list[Any], final: Any) -> None:
    """They are numbered, every item is opened, written and closed, and its pieces join to what the answer has."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    for index, item in enumerate(final.output):
        of_item = [event for event in events if getattr(event, "output_index", None) == index]
        assert of_item[0].type == "response.output_item.added" and of_item[0].item.status == "in_progress"
        assert of_item[-1].type == "response.output_item.done"
        closed = of_item[-1].item
        assert (closed.id, closed.status, shown([closed])) == (item.id, item.status, shown([item]))
        written = "".join(event.delta for event in of_item if event.type.endswith(".delta"))
        done = next(event for event in of_item if event.type.endswith(("text.done", "arguments.done")))
        assert all(event.item_id == item.id for event in of_item if hasattr(event, "item_id"))
        if item.type == "function_call":
            assert written == item.arguments == done.arguments and done.name == item.name
        else:
            assert written == item.content[0].text == done.text
            kinds = [event.type for event in of_item if "content_part" in event.type]
            assert kinds == ["response.content_part.added", "response.content_part.done"]


@pytest.mark.parametrize("question", ASKED)
def test_a_thought_and_an_answer(client: OpenAI, question: str) -> None:
    whole = client.responses.create(model="scripted", input=question)
    assert shown(whole.output) == [("reasoning", THOUGHT), ("message", TEXT)]
    assert whole.status == "completed" and whole.output_text == TEXT
    assert 2 <= whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens - 3
    events, final = streamed(client, input=question)
    check_events(events, final)
    assert shown(final.output) == shown(whole.output)
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert len(thought) > 1 and "".join(thought) == THOUGHT


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])  # at 2.0 the script is left once in some hundred runs
def test_structured_output_begins_after_the_thought(client: OpenAI, question: str, temperature: float) -> None:
    answer = client.responses.parse(model="scripted", input=question, text_format=Cat, temperature=temperature)
    assert shown(answer.output)[0] == ("reasoning", THOUGHT)
    assert isinstance(answer.output_parsed, Cat)
    events, final = streamed(client, input=question, text_format=Cat, temperature=temperature)
    check_events(events, final)
    assert isinstance(final.output_parsed, Cat) and final.usage.output_tokens_details.reasoning_tokens > 1


@pytest.mark.parametrize("question", ASKED)
def test_chat_thinks_before_its_structured_output_too(client: OpenAI, question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = client.chat.completions.parse(model="scripted", messages=messages, response_format=Cat, n=2)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Cat) and choice.message.reasoning_content == THOUGHT


def test_json_object_after_the_thought(client: OpenAI) -> None:
    text: Any = {"format": {"type": "json_object"}}
    answer = client.responses.create(model="scripted", input="Hi.", text=text, temperature=0, max_output_tokens=60)
    assert shown(answer.output)[0] == ("reasoning", THOUGHT) and answer.output_text.startswith("{")


@pytest.mark.parametrize("question", ASKED)
def test_a_thought_that_is_cut_is_all_there_is(client: OpenAI, question: str) -> None:
    schema = {"type": "json_schema", "name": "cat", "schema": Cat.model_json_schema()}
    options: Any = {"model": "scripted", "input": question, "text": {"format": schema}, "max_output_tokens": 2}
    answer = client.responses.create(**options)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert [(item.type, item.status) for item in answer.output] == [("reasoning", "incomplete")]
    assert THOUGHT.startswith(shown(answer.output)[0][1]) and answer.output_text == ""
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    events = list(client.responses.create(**options, stream=True))
    assert events[-1].type == "response.incomplete" and shown(events[-1].response.output) == shown(answer.output)


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "roll_dice"}])
def test_a_required_call_comes_after_the_thought(client: OpenAI, question: str, choice: Any) -> None:
    tools = [ROLL, TOOLS[1]]  # the first is for the client, which sends it as the others are
    options: Any = {"input": question, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.responses.parse(model="scripted", **options)
    events, final = streamed(client, **options)
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


def test_a_format_of_texts_beside_a_required_call(client: OpenAI) -> None:
    """As instructor sends both: the format is for a message, and there will be a call."""
    text: Any = {"format": {"type": "json_schema", "name": "cat", "schema": Cat.model_json_schema()}}
    answer = client.responses.create(model="scripted", input="Hi.", tools=TOOLS, tool_choice=TOOLS_ROLL, text=text)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    assert Roll.model_validate_json(answer.output[1].arguments)


def test_several_calls_in_one_answer(client: OpenAI) -> None:
    for _ in range(20):  # it tosses a coin for another call
        events, final = streamed(client, input="Hi.", tools=TOOLS, tool_choice="required")
        check_events(events, final)
        ids = [item.call_id for item in final.output if item.type == "function_call"]
        assert len(set(ids)) == len(ids) == len(final.output) - 1
        if len(ids) > 1:
            return
    raise AssertionError("there was never more than one call")


def test_a_call_that_the_model_chose_to_make(client: OpenAI) -> None:
    options: Any = {"input": "Roll!", "tools": TOOLS}
    whole = client.responses.create(model="scripted", **options)
    assert shown(whole.output) == [("function_call", 'roll_dice{"sides": 6}'), ("message", "Done.")]
    assert whole.tools[0].name == "roll_dice" and whole.tool_choice == "auto"
    events, final = streamed(client, **options)
    check_events(events, final)
    assert shown(final.output) == shown(whole.output)
    for off in ({"tool_choice": "none"}, {"tools": []}):
        answer = client.responses.create(model="scripted", **(options | off))
        assert shown(answer.output)[0][0] == "message" and answer.output_text.startswith("<tool_call>")


CHAT_TOOLS: list[Any] = [
    {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in TOOLS
]


def test_custom_tools(client: OpenAI) -> None:
    check_custom_calls(client)


def test_allowed_tools_and_no_second_call(client: OpenAI) -> None:
    check_allowed_tools(client, CHAT_TOOLS, "stop")
    check_only_one(client, CHAT_TOOLS)
    answer = client.responses.create(
        model="scripted", input="Roll!", tools=TOOLS, parallel_tool_calls=False, temperature=0
    )
    assert shown(answer.output) == [("function_call", 'roll_dice{"sides": 6}')]  # without what it says behind a call
    assert answer.usage.output_tokens < 10 and not answer.parallel_tool_calls
    endless = client.responses.create(
        model="scripted",
        input="Roll!",
        tools=TOOLS,
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=30,
        extra_body={"ignore_eos": True},
    )
    assert shown(endless.output) == shown(answer.output) and endless.usage.output_tokens == 30


def test_a_call_that_a_stop_string_cuts_is_none(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Roll!"}]
    for stop in ("name", "ides", "6}"):
        options: Any = {"model": "scripted", "messages": messages, "tools": CHAT_TOOLS, "stop": stop, "temperature": 0}
        choice = client.chat.completions.create(**options).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "", None)


def test_a_format_of_texts_beside_tools_leaves_both_open(client: OpenAI) -> None:
    """The model would roll dice of its own accord, and may: the format is for what it says instead."""
    text: Any = {"format": {"type": "json_schema", "name": "cat", "schema": Cat.model_json_schema()}}
    called = client.responses.create(model="scripted", input="Roll!", tools=[TOOLS[0]], text=text, temperature=0)
    assert called.output[0].type == "function_call" and Roll.model_validate_json(called.output[0].arguments)
    kinds = set()
    for seed in range(12):  # behind its thought it has no line for either, and draws
        said = client.responses.create(
            model="scripted", input="Hi.", tools=TOOLS, text=text, extra_body={"seed": seed}, parallel_tool_calls=False
        )
        last = said.output[-1]
        kinds.add(last.type)
        if last.type == "message":
            assert Cat.model_validate_json(said.output_text)
    assert kinds == {"message", "function_call"}


def test_an_answer_cut_anywhere_has_whole_calls_alone(client: OpenAI) -> None:
    assert 1 <= check_cut_answers(client, "Roll!", range(1, 9), TOOLS, "auto") < 8
    assert 1 <= check_cut_answers(client, "Hi.", [7, 16, 41, 52, 58, 68, 90], TOOLS, TOOLS_ROLL) < 7


@pytest.mark.slow
def test_required_calls_cut_at_every_token(client: OpenAI) -> None:
    assert 1 <= check_cut_answers(client, "Hi.", range(1, 90), TOOLS, TOOLS_ROLL) < 90


def test_logprobs_are_those_of_the_text(client: OpenAI) -> None:
    """Neither the thought's nor the end's, and the same as chat has for these tokens."""
    options: Any = {"input": "Hello.", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    whole = client.responses.create(model="scripted", **options)
    found = whole.output[1].content[0].logprobs
    assert "".join(entry.token for entry in found) == TEXT == whole.output_text
    assert bytes(byte for entry in found for byte in entry.bytes).decode() == TEXT and whole.top_logprobs == 2
    messages: list[Any] = [{"role": "user", "content": "Hello."}]
    chat = client.chat.completions.create(
        model="scripted", messages=messages, logprobs=True, top_logprobs=2, temperature=0
    )
    wanted = {entry.token: (entry.logprob, len(entry.top_logprobs)) for entry in chat.choices[0].logprobs.content}
    assert all((entry.logprob, len(entry.top_logprobs)) == wanted[entry.token] for entry in found)
    events, final = streamed(client, **options)
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    done = next(event.logprobs for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in deltas] == [entry.token for entry in done] == [entry.token for entry in found]
    assert final.output[1].content[0].logprobs == found
    without = client.responses.create(model="scripted", input="Hello.")
    assert without.output[1].content[0].logprobs == []


def test_a_conversation_goes_on_from_its_items(client: OpenAI) -> None:
    first = client.responses.create(model="scripted", input="Ponder.", tools=TOOLS, tool_choice="required")
    conversation: list[Any] = [{"role": "user", "content": "Ponder."}, *first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
    answer = client.responses.create(model="scripted", input=conversation, tools=TOOLS)
    assert answer.output_text == TEXT
    turn = {
        "role": "assistant",
        "content": None,
        "reasoning_content": THOUGHT,
        "tool_calls": [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ],
    }
    results = [{"role": "tool", "tool_call_id": call.call_id, "content": "4"} for call in calls]
    messages: list[Any] = [conversation[0], turn, *results]
    tools: Any = [
        {
            "type": "function",
            "function": {key: tool[key] for key in ("name", "description", "parameters") if key in tool},
        }
        for tool in TOOLS
    ]
    chat = client.chat.completions.create(model="scripted", messages=messages, tools=tools)
    assert chat.usage.prompt_tokens == answer.usage.input_tokens  # the model reads the same, item by item


def test_a_refusal_is_what_the_assistant_said(client: OpenAI) -> None:
    def turns(content: Any) -> list[Any]:
        return [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "Oh"},
        ]

    said = turns("I will not.")
    refused = turns([{"type": "refusal", "refusal": "I will not."}])
    lengths = {client.responses.create(model="scripted", input=input_).usage.input_tokens for input_ in (said, refused)}
    empty = turns(None)
    empty[1]["refusal"] = "I will not."
    for messages in (said, refused, empty):
        lengths.add(client.chat.completions.create(model="scripted", messages=messages).usage.prompt_tokens)
    assert len(lengths) == 1


def test_a_hole_is_filled(client: OpenAI) -> None:
    """Through plain completions, by a model that has tokens for it; what ends it is no part of the answer."""
    options: Any = {
        "model": "scripted",
        "prompt": "def add(a, b):\n",
        "suffix": " # a sum",
        "temperature": 0,
    }
    answer = client.completions.create(**options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("return a + b", "stop")
    assert answer.usage.prompt_tokens == len(options["prompt"] + options["suffix"]) + 3  # a token a character here
    streamed = client.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "return a + b"
    ids: Any = [100, 101]
    again = client.completions.create(**(options | {"prompt": ids}))
    assert again.choices[0].text == "return a + b" and again.usage.prompt_tokens == 5 + len(options["suffix"])
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(**options, echo=True)


CALL = {"type": "function_call", "call_id": "a", "name": "stop", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "nested"}}]}, "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a", "parameters": [1]}]}, "tools[0].parameters"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "any", "tools": [TOOLS_ROLL]}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [5]}}, "tool_choice"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "xml"}}]}, "tools[0].format.type"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "grammar"}}]}, "tools[0].format"),
        (
            {
                "tools": [
                    {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "gbnf", "definition": ""}}
                ]
            },
            "tools[0].format.syntax",
        ),
        (
            {
                "tools": [
                    {
                        "type": "custom",
                        "name": "a",
                        "format": {"type": "grammar", "syntax": "lark", "definition": "start"},
                    }
                ]
            },
            "tools",
        ),
        (
            {
                "tools": [
                    {"type": "custom", "name": "a", "format": {"type": "grammar", "syntax": "regex", "definition": "("}}
                ]
            },
            "tools",
        ),
        ({"input": [{"type": "custom_tool_call", "call_id": "a", "name": "b"}]}, "input[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "strig"}}}}, "text.format.schema"),
        ({"previous_response_id": 7}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs", "message.mood"]}, "include[1]"),
        ({"n": 2}, "n"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"min_p": 2}, "min_p"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input[0].arguments"),
        ({"input": [{**CALL, "name": None}]}, "input[0]"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "b", "output": ""}]}, "input[1].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "a"}]}, "input[1]"),
        ({"input": [{"type": "reasoning", "content": [{"type": "image"}]}]}, "input[0].content[0]"),
    ],
)
def test_refusals_name_the_field(server: RunningServer, fields: dict[str, object], param: str) -> None:
    answer = server.post("/v1/responses", {"input": "Hi.", "max_output_tokens": 4, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_what_says_nothing_new_is_let_be(server: RunningServer) -> None:
    plain = {"truncation": "disabled", "top_logprobs": 0, "n": 1, "include": ["reasoning.encrypted_content"]}
    answer = server.post("/v1/responses", {"input": "Hi.", "max_output_tokens": 2, **plain})
    assert answer.status_code == 200, answer.text
