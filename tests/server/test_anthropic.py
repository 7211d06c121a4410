"""Anthropic's API with Anthropic's own client, whole and streamed: texts, thoughts, tools, counts, errors."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.server.running import RunningServer

THOUGHT, TEXT = "Let me see.", "Well, well."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sides": {"enum": [4, 6, 20]}},
    "required": ["sides"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"name": "roll_dice", "description": "Roll dice.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"name": "stop", "input_schema": {"type": "object", "additionalProperties": False}},
]
SEA: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
GREEDY: Any = {"extra_body": {"temperature": 0}}
"""The client's own signature has it no more."""
CALL: dict[str, Any] = {"type": "tool_use", "id": "toolu_1", "name": "roll_dice", "input": {"sides": 6}}


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Anthropic:
    return Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def scripted(scripted_server: RunningServer) -> Anthropic:
    return Anthropic(base_url=scripted_server.address, api_key="none", max_retries=0, timeout=60)


def ask(client: Anthropic, content: Any, **options: Any) -> anthropic.types.Message:
    """Of the scripted model."""
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return client.messages.create(**{"model": "scripted", "max_tokens": 100, "messages": messages, **options})


def streamed(client: Anthropic, **options: Any) -> tuple[list[Any], anthropic.types.Message]:
    with client.messages.stream(**options) as stream:
        events = list(stream)
        return events, stream.get_final_message()


def shown(message: anthropic.types.Message) -> list[tuple[str, Any]]:
    texts = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [(block.type, getattr(block, texts[block.type])) for block in message.content]


def check_events(response: httpx.Response) -> list[dict[str, Any]]:
    """Blocks are numbered, opened once, written and closed before the next; each event's name is its type."""
    events = []
    for chunk in response.text.split("\n\n")[:-1]:
        name, data = chunk.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    told = [event for event in events if event["type"] != "ping"]
    assert told[0]["type"] == "message_start" and [e["type"] for e in told[-2:]] == ["message_delta", "message_stop"]
    open_index, num_blocks = None, 0
    for event in told[1:-2]:
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == num_blocks
            open_index, num_blocks = num_blocks, num_blocks + 1
        else:
            assert event["index"] == open_index
        if event["type"] == "content_block_stop":
            open_index = None
    assert open_index is None
    return told


def test_the_text_is_that_of_chat(server: RunningServer, client: Anthropic) -> None:
    options: Any = {"model": "smollm2", "max_tokens": 16}
    system = "You are terse."
    whole = client.messages.create(messages=SEA, system=system, **options, **GREEDY)
    openai = OpenAI(base_url=server.base_url, api_key="none")
    messages: Any = [{"role": "system", "content": system}, *SEA]
    chat = openai.chat.completions.create(messages=messages, temperature=0, **options)
    assert shown(whole) == [("text", chat.choices[0].message.content)]
    assert whole.stop_reason == {"stop": "end_turn", "length": "max_tokens"}[chat.choices[0].finish_reason]
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.id.startswith("msg_") and whole.model == "smollm2" and whole.timing["decode"]["tokens"] > 1
    plain = {"extra_body": {"temperature": 0, "speculation": "off"}}  # drafts that hold come several in an event
    events, final = streamed(client, messages=SEA, system=[{"type": "text", "text": system}], **options, **plain)
    assert shown(final) == shown(whole) and final.stop_reason == whole.stop_reason
    assert len([event for event in events if event.type == "text"]) > 5
    assert final.usage.output_tokens == whole.usage.output_tokens
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": SEA[0]["content"]}]}]
    assert shown(client.messages.create(messages=blocks, system=system, **options, **GREEDY)) == shown(whole)


def test_counting_equals_usage_and_what_was_cached_is_told(client: Anthropic) -> None:
    long: Any = [{"role": "user", "content": "A word of the sea, and a word of the wind. " * 20}]
    counted = client.messages.count_tokens(model="smollm2", messages=long, system="Be brief.", tools=TOOLS)
    for has_read in (False, True):
        answer = client.messages.create(
            model="smollm2", messages=long, system="Be brief.", tools=TOOLS, max_tokens=2, **GREEDY
        )
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
        assert (usage.cache_read_input_tokens > 100) == has_read
    plain = client.messages.count_tokens(model="smollm2", messages=long)
    assert plain.input_tokens < counted.input_tokens


def test_a_stop_sequence_is_named(client: Anthropic) -> None:
    options: Any = {"model": "smollm2", "messages": SEA, "max_tokens": 40, **GREEDY}
    text = client.messages.create(**options).content[0].text
    stop = text[20:26]
    for message in (
        client.messages.create(**options, stop_sequences=["never written", stop]),
        streamed(client, **options, stop_sequences=["never written", stop])[1],
    ):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("question", ["Hello.", "Ponder this."])
def test_a_thought_is_a_block_with_a_signature(scripted: Anthropic, question: str) -> None:
    options: Any = {"max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = ask(scripted, question, **options)
    assert shown(whole) == [("thinking", THOUGHT), ("text", TEXT)] and whole.stop_reason == "end_turn"
    assert whole.content[0].signature and whole.usage.output_tokens_details.thinking_tokens >= 2
    messages: Any = [{"role": "user", "content": question}]
    plain: Any = {"extra_body": {"speculation": "off"}}
    events, final = streamed(scripted, model="scripted", messages=messages, **options, **plain)
    assert shown(final) == shown(whole) and final.content[0].signature == whole.content[0].signature
    assert len([event for event in events if event.type == "thinking"]) > 1
    hidden = ask(scripted, question, thinking={"type": "adaptive", "display": "omitted"})
    assert shown(hidden) == [("thinking", ""), ("text", TEXT)]
    assert shown(ask(scripted, question, thinking={"type": "disabled"})) == [("text", TEXT)]
    # And back again: the thought reaches the template, as a redacted one cannot.
    later: Any = [*messages, hidden.to_param(), {"role": "user", "content": "More."}]
    told: Any = [*messages, whole.to_param(), {"role": "user", "content": "More."}]
    redacted: Any = [
        *messages,
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": TEXT}]},
        {"role": "user", "content": "More."},
    ]
    counts = [
        scripted.messages.count_tokens(model="scripted", messages=m).input_tokens for m in (told, later, redacted)
    ]
    assert counts[0] > counts[1] == counts[2]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "roll_dice"}])
def test_a_required_call_comes_after_the_thought(scripted: Anthropic, choice: dict[str, Any]) -> None:
    options: Any = {"tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}, "max_tokens": 100}
    whole = ask(scripted, "Hi.", **options)
    messages: Any = [{"role": "user", "content": "Hi."}]
    events, final = streamed(scripted, model="scripted", messages=messages, **options)
    for message in (whole, final):
        assert message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking", "tool_use"]
        call = message.content[1]
        assert call.id.startswith("toolu_") and call.name in ("roll_dice", "stop")
        assert call.input == {} if call.name == "stop" else call.input["sides"] in (4, 6, 20)
        assert choice["type"] == "any" or call.name == "roll_dice"
    assert any(event.type == "input_json" for event in events)


def test_a_call_that_the_model_chose_and_its_result(scripted_server: RunningServer, scripted: Anthropic) -> None:
    first = ask(scripted, "Roll!", tools=TOOLS)
    assert shown(first) == [("tool_use", {"sides": 6}), ("text", "Done.")] and first.stop_reason == "tool_use"
    off = ask(scripted, "Roll!", tools=TOOLS, tool_choice={"type": "none"})
    assert off.content[0].type == "text" and off.stop_reason == "end_turn"
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [{"type": "text", "text": "4"}]}
    turns: list[Any] = [
        {"role": "user", "content": "Roll!"},
        first.to_param(),
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    answer = ask(scripted, turns, tools=TOOLS)
    assert shown(answer) == [("thinking", THOUGHT), ("text", TEXT)]
    # The model reads what it would read through chat.
    function = {"name": "roll_dice", "arguments": '{"sides": 6}'}
    tools = [
        {"type": "function", "function": {"name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS
    ]
    tools[0]["function"]["description"] = "Roll dice."
    chat = OpenAI(base_url=scripted_server.base_url, api_key="none").chat.completions.create(
        model="scripted",
        messages=[
            {"role": "user", "content": "Roll!"},
            {
                "role": "assistant",
                "content": "Done.",
                "tool_calls": [{"id": "a", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "4"},
            {"role": "user", "content": "Well?"},
        ],
        tools=tools,
    )
    assert chat.usage.prompt_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


@pytest.mark.parametrize("max_tokens", range(1, 16))
def test_a_call_that_is_cut_is_none(scripted_server: RunningServer, max_tokens: int) -> None:
    body: dict[str, Any] = {
        "model": "scripted",
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "Roll!"}],
        "tools": TOOLS[:1],
    }
    whole = scripted_server.post("/v1/messages?beta=true", body).json()
    told = check_events(scripted_server.post("/v1/messages", {**body, "stream": True}))
    starts = [event["content_block"]["type"] for event in told if event["type"] == "content_block_start"]
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert starts == [block["type"] for block in whole["content"]]
    assert told[-2]["delta"]["stop_reason"] == whole["stop_reason"]
    assert "tool_call" not in json.dumps(whole["content"])
    assert all(block["input"] == {"sides": 6} for block in calls)
    if whole["stop_reason"] == "max_tokens":
        assert whole["usage"]["output_tokens"] == max_tokens
    else:
        assert whole["stop_reason"] == "tool_use" and calls


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mood: str


def test_structured_output(scripted: Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"mood": {"enum": ["calm", "wild"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    answer = ask(scripted, "Hi.", output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert Cat.model_validate_json(answer.content[-1].text).mood in ("calm", "wild")


def test_agents_ask_for_more_than_the_context_holds(client: Anthropic) -> None:
    """They send the most that they would take, whatever the model: an answer may go on to the context's end."""

    def asked(number: int) -> Any:
        return {"model": "smollm2", "messages": [{"role": "user", "content": "sea " * number}]}

    rest = client.messages.count_tokens(**asked(100)).input_tokens - 100
    answer = client.messages.create(**asked(2044 - rest), max_tokens=32_000, **GREEDY)
    assert answer.stop_reason == "model_context_window_exceeded" and answer.usage.output_tokens == 4
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: the prompt has 2048 tokens"):
        client.messages.create(**asked(2048 - rest), max_tokens=32_000)


def test_turns_that_others_would_trip_over(scripted: Anthropic) -> None:
    """A thought that was cut is all there is of a turn; neighbours of one role are one; a result may be an error."""
    thought = {"type": "thinking", "thinking": "Hm", "signature": "from elsewhere"}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no dice", "is_error": True}
    user = {"role": "user", "content": "Hi."}
    for turns in (
        [user, {"role": "assistant", "content": [thought]}, user],
        [user, user, {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}, user],
        [user, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [failed]}],
        [{"role": "system", "content": "Be kind."}, user],
    ):
        assert ask(scripted, turns, system="You are old.").content[-1].text == TEXT
    count = scripted.messages.count_tokens
    joined = [{"role": "user", "content": "Hi.\nHi."}]
    assert count(model="scripted", messages=[user, user]) == count(model="scripted", messages=joined)


def test_a_client_that_leaves_frees_the_engine(server: RunningServer, client: Anthropic) -> None:
    options: Any = {"model": "smollm2", "messages": SEA, "max_tokens": 1500}
    with client.messages.stream(**options) as stream:
        for _ in range(6):
            next(stream)
    server.wait_until_idle()
