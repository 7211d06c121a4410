"""`/v1/responses` with the real client: thoughts, texts and calls as items, whole, streamed and parsed. The model
thinks before it answers, so that what it is held to begins after that."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.server.response_cases import (
    ASKED,
    TEXT,
    THOUGHT,
    TOOLS,
    Cat,
    check_events,
    shown,
    streamed,
)


@pytest.mark.parametrize("question", ASKED)
def test_a_thought_and_an_answer(scripted: OpenAI, question: str) -> None:
    whole = scripted.responses.create(model="scripted", input=question)
    assert shown(whole.output) == [("reasoning", THOUGHT), ("message", TEXT)]
    assert whole.status == "completed" and whole.output_text == TEXT
    assert 2 <= whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens - 3
    events, final = streamed(scripted, input=question, extra_body={"speculation": "off"})
    check_events(events, final)
    assert shown(final.output) == shown(whole.output)
    assert final.usage.output_tokens_details == whole.usage.output_tokens_details
    thought = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert len(thought) > 1 and "".join(thought) == THOUGHT


@pytest.mark.parametrize("question", ASKED)
@pytest.mark.parametrize("temperature", [0.0, 1.0])  # at 2.0 the script is left once in some hundred runs
def test_structured_output_begins_after_the_thought(scripted: OpenAI, question: str, temperature: float) -> None:
    answer = scripted.responses.parse(model="scripted", input=question, text_format=Cat, temperature=temperature)
    assert shown(answer.output)[0] == ("reasoning", THOUGHT)
    assert isinstance(answer.output_parsed, Cat)
    events, final = streamed(scripted, input=question, text_format=Cat, temperature=temperature)
    check_events(events, final)
    assert isinstance(final.output_parsed, Cat) and final.usage.output_tokens_details.reasoning_tokens > 1


@pytest.mark.parametrize("question", ASKED)
def test_chat_thinks_before_its_structured_output_too(scripted: OpenAI, question: str) -> None:
    messages: list[Any] = [{"role": "user", "content": question}]
    answer = scripted.chat.completions.parse(model="scripted", messages=messages, response_format=Cat, n=2)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Cat) and choice.message.reasoning_content == THOUGHT


def test_json_object_after_the_thought(scripted: OpenAI) -> None:
    text: Any = {"format": {"type": "json_object"}}
    answer = scripted.responses.create(model="scripted", input="Hi.", text=text, temperature=0, max_output_tokens=60)
    assert shown(answer.output)[0] == ("reasoning", THOUGHT) and answer.output_text.startswith("{")


@pytest.mark.parametrize("question", ASKED)
def test_a_thought_that_is_cut_is_all_there_is(scripted: OpenAI, question: str) -> None:
    schema = {"type": "json_schema", "name": "cat", "schema": Cat.model_json_schema()}
    options: Any = {"model": "scripted", "input": question, "text": {"format": schema}, "max_output_tokens": 2}
    answer = scripted.responses.create(**options)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert [(item.type, item.status) for item in answer.output] == [("reasoning", "incomplete")]
    assert THOUGHT.startswith(shown(answer.output)[0][1]) and answer.output_text == ""
    assert answer.usage.output_tokens_details.reasoning_tokens == 2
    events = list(scripted.responses.create(**options, stream=True))
    assert events[-1].type == "response.incomplete" and shown(events[-1].response.output) == shown(answer.output)


def test_logprobs_are_those_of_the_text(scripted: OpenAI) -> None:
    """Neither the thought's nor the end's, and the same as chat has for these tokens."""
    options: Any = {"input": "Hello.", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    whole = scripted.responses.create(model="scripted", **options)
    found = whole.output[1].content[0].logprobs
    assert "".join(entry.token for entry in found) == TEXT == whole.output_text
    assert bytes(byte for entry in found for byte in entry.bytes).decode() == TEXT and whole.top_logprobs == 2
    messages: list[Any] = [{"role": "user", "content": "Hello."}]
    chat = scripted.chat.completions.create(
        model="scripted", messages=messages, logprobs=True, top_logprobs=2, temperature=0
    )
    wanted = {entry.token: (entry.logprob, len(entry.top_logprobs)) for entry in chat.choices[0].logprobs.content}
    assert all((entry.logprob, len(entry.top_logprobs)) == wanted[entry.token] for entry in found)
    events, final = streamed(scripted, **options)
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    done = next(event.logprobs for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in deltas] == [entry.token for entry in done] == [entry.token for entry in found]
    assert final.output[1].content[0].logprobs == found
    without = scripted.responses.create(model="scripted", input="Hello.")
    assert without.output[1].content[0].logprobs == []


def test_a_conversation_goes_on_from_its_items(scripted: OpenAI) -> None:
    first = scripted.responses.create(model="scripted", input="Ponder.", tools=TOOLS, tool_choice="required")
    conversation: list[Any] = [{"role": "user", "content": "Ponder."}, *first.output]
    calls = [item for item in first.output if item.type == "function_call"]
    conversation += [{"type": "function_call_output", "call_id": call.call_id, "output": "4"} for call in calls]
    answer = scripted.responses.create(model="scripted", input=conversation, tools=TOOLS)
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
    chat = scripted.chat.completions.create(model="scripted", messages=messages, tools=tools)
    assert chat.usage.prompt_tokens == answer.usage.input_tokens  # the model reads the same, item by item


def test_a_refusal_is_what_the_assistant_said(scripted: OpenAI) -> None:
    def turns(content: Any) -> list[Any]:
        return [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "Oh"},
        ]

    said = turns("I will not.")
    refused = turns([{"type": "refusal", "refusal": "I will not."}])
    lengths = {
        scripted.responses.create(model="scripted", input=input_).usage.input_tokens for input_ in (said, refused)
    }
    empty = turns(None)
    empty[1]["refusal"] = "I will not."
    for messages in (said, refused, empty):
        lengths.add(scripted.chat.completions.create(model="scripted", messages=messages).usage.prompt_tokens)
    assert len(lengths) == 1


def test_a_hole_is_filled(scripted: OpenAI) -> None:
    """Through plain completions, by a model that has tokens for it; what ends it is no part of the answer."""
    options: Any = {
        "model": "scripted",
        "prompt": "def add(a, b):\n",
        "suffix": " # a sum",
        "temperature": 0,
    }
    answer = scripted.completions.create(**options)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("return a + b", "stop")
    assert answer.usage.prompt_tokens == len(options["prompt"] + options["suffix"]) + 3  # a token a character here
    streamed = scripted.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "return a + b"
    ids: Any = [100, 101]
    again = scripted.completions.create(**(options | {"prompt": ids}))
    assert again.choices[0].text == "return a + b" and again.usage.prompt_tokens == 5 + len(options["suffix"])
    with pytest.raises(openai.BadRequestError, match="echo"):
        scripted.completions.create(**options, echo=True)
