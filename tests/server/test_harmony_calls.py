"""gpt-oss's tools through the server, with the clients that people use: thoughts, words on the way, calls and answers,
whole and streamed, in all three APIs, and conversations that go on from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.server.custom_calls import check_allowed_tools, check_custom_calls, check_only_one
from tests.server.cut_calls import check_cut_answers
from tests.server.response_cases import check_events, shown, streamed
from tests.server.running import RunningServer, running_server
from tests.server.scripted_turns import (
    AFTER_THOUGHT,
    ANSWER,
    CHANNEL,
    END,
    MESSAGE,
    PREAMBLE,
    START,
    THOUGHT,
    make_scripted_turns,
)

SCHEMAS: dict[str, Any] = {
    "roll_dice": {"type": "object", "properties": {"sides": {"type": "integer"}}, "required": ["sides"]},
    "say": {"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}}},
    "look": {"type": "object", "properties": {}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
FLAT_TOOLS: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
BLOCK_TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
ROLL, SAY, LOOK = ("roll_dice", {"sides": 6}), ("say", {"words": ["yes"]}), ("look", {})
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
TURNS: list[tuple[str, str, str | None, list[tuple[str, Any]]]] = [
    ("Roll a die.", THOUGHT, None, [ROLL]),
    ("Roll on.", "A word first.", PREAMBLE, [ROLL]),
    ("Look and roll.", "Both, then.", None, [LOOK, ROLL]),
    ("Hello.", "A greeting.", "Well met.", []),
]
"""Asked, and thought, said and called."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("turns")
    model = make_scripted_turns(folder / "model")
    with running_server(folder / "log", str(model), "--backend", "reference", "--name", "scripted") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def claude(server: RunningServer) -> Anthropic:
    return Anthropic(base_url=server.address, api_key="none", max_retries=0, timeout=120)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def chat(client: OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="scripted", messages=messages, tools=TOOLS, temperature=0, **options)


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def result(call: Any, text: str) -> Any:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def prompt_text(server: RunningServer, messages: list[Any]) -> str:
    """What the model reads of a conversation."""
    plain = [message if isinstance(message, dict) else message.model_dump(exclude_unset=True) for message in messages]
    body = {"messages": plain, "tools": TOOLS, "return_token_strs": True}
    answer = server.post("/tokenize", body)
    assert answer.status_code == 200, answer.text
    return "".join(answer.json()["token_strs"])


@pytest.mark.parametrize(("asked", "thought", "content", "calls"), TURNS)
def test_chat(client: OpenAI, asked: str, thought: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    choice = chat(client, [user(asked)]).choices[0]
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert (choice.message.reasoning_content, choice.message.content) == (thought, content)
    assert calls_of(choice.message) == calls
    for more in ({}, {"extra_body": {"speculation": "off"}}):  # drafts come several in a chunk
        with client.chat.completions.stream(
            model="scripted",
            messages=[user(asked)],
            tools=TOOLS,
            temperature=0,
            **more,  # type: ignore[arg-type]
        ) as stream:
            chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk"]
            final = stream.get_final_completion().choices[0]
        assert "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks) == thought
        assert (final.message.content or None, final.finish_reason) == (content, choice.finish_reason)
        assert calls_of(final.message) == calls


def test_a_conversation_of_several_calls_goes_on_to_its_answer(server: RunningServer, client: OpenAI) -> None:
    """The thought before a call is read again until the answer is given, and no longer."""
    messages = [user("Roll a die.")]
    first = chat(client, messages).choices[0].message
    messages += [first, result(first.tool_calls[0], "5")]
    second = chat(client, messages).choices[0].message
    assert (second.reasoning_content, calls_of(second)) == ("Not yet.", [SAY])
    messages += [second, result(second.tool_calls[0], "4")]
    text = prompt_text(server, messages)
    assert text.count(f"{START}assistant{ANALYSIS}{THOUGHT}{END}{START}assistant to=functions.roll_dice") == 1
    assert text.count(f"{START}assistant{ANALYSIS}Not yet.{END}{START}assistant to=functions.say") == 1
    assert text.endswith(f'{START}functions.say to=assistant{CHANNEL}commentary{MESSAGE}"4"{END}{START}assistant')
    last = chat(client, messages).choices[0]
    assert (last.message.reasoning_content, last.message.content) == (AFTER_THOUGHT, ANSWER)
    assert last.finish_reason == "stop" and not last.message.tool_calls
    text = prompt_text(server, [*messages, last.message, user("Hello.")])
    assert ANALYSIS not in text and "to=functions.roll_dice" in text and f"{CHANNEL}final{MESSAGE}{ANSWER}" in text


def test_several_calls_of_one_answer_come_back_with_all_their_results(server: RunningServer, client: OpenAI) -> None:
    """Such a template reads a message's first call, and takes a result for the last call's."""
    messages = [user("Look and roll.")]
    both = chat(client, messages).choices[0].message
    look, roll = both.tool_calls
    messages += [both, result(roll, "4"), result(look, "a die")]
    text = prompt_text(server, messages)
    seen = f'{CHANNEL}commentary{MESSAGE}"a die"{END}'
    rows = [
        f"{START}assistant{ANALYSIS}Both, then.{END}",
        f"{START}assistant to=functions.look{CHANNEL}commentary json{MESSAGE}{{}}<|call|>",
        f"{START}functions.look to=assistant{seen}",
        f'{START}assistant to=functions.roll_dice{CHANNEL}commentary json{MESSAGE}{{"sides": 6}}<|call|>',
        f'{START}functions.roll_dice to=assistant{CHANNEL}commentary{MESSAGE}"4"{END}',
    ]
    assert "".join(rows) in text
    assert chat(client, messages).choices[0].message.content == ANSWER


def test_content_beside_a_thought_and_a_call_is_read_again(server: RunningServer, client: OpenAI) -> None:
    """The template refuses both in one message."""
    messages = [user("Roll on.")]
    said = chat(client, messages).choices[0].message
    messages += [said, result(said.tool_calls[0], "4")]
    assert f"{ANALYSIS}{said.reasoning_content}\n\n{PREAMBLE}{END}" in prompt_text(server, messages)
    assert chat(client, messages).choices[0].message.content == ANSWER


def test_clients_that_write_null_for_nothing(server: RunningServer, client: OpenAI) -> None:
    for nothing in (None, []):
        said = {"role": "assistant", "content": "Well met.", "tool_calls": nothing, "reasoning_content": None}
        plain = {"role": "assistant", "content": "Well met."}
        found = [prompt_text(server, [user("Hello."), turn, user("Hello.")]) for turn in (said, plain)]
        assert found[0] == found[1]


def test_required_calls_in_a_stream(client: OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "say"}}):
        stream = client.chat.completions.create(
            model="scripted",
            messages=[user("Hello.")],
            tools=TOOLS,
            tool_choice=choice,  # type: ignore[arg-type]
            temperature=1.5,
            n=4,
            seed=7,
            max_tokens=400,
            stream=True,
        )
        calls: dict[int, list[str]] = {}
        ends = {}
        for chunk in stream:
            for sample in chunk.choices:
                assert not sample.delta.content
                ends[sample.index] = sample.finish_reason or ends.get(sample.index)
                for call in sample.delta.tool_calls or []:
                    calls.setdefault(sample.index, []).extend([call.function.name or "", call.function.arguments])
        done = [calls[index] for index, reason in ends.items() if reason == "tool_calls"]
        assert done and len(ends) == 4 and set(ends.values()) <= {"tool_calls", "length"}
        for name, *pieces in done:
            assert name in SCHEMAS and (choice == "required" or name == "say")
            assert isinstance(json.loads("".join(pieces)), dict)


@pytest.mark.parametrize(("asked", "thought", "content", "calls"), TURNS)
def test_responses(client: OpenAI, asked: str, thought: str, content: str | None, calls: list[tuple[str, Any]]) -> None:
    wanted = [("reasoning", thought)]
    wanted += [("message", content)] if content else []
    wanted += [("function_call", name + json.dumps(arguments)) for name, arguments in calls]
    options: Any = {"input": asked, "tools": FLAT_TOOLS, "temperature": 0}
    whole = client.responses.create(model="scripted", **options)
    assert shown(whole.output) == wanted and whole.status == "completed"
    for more in ({}, {"extra_body": {"speculation": "off"}}):
        events, final = streamed(client, **options, **more)
        check_events(events, final)
        assert shown(final.output) == wanted


def test_responses_go_on_by_items_and_by_name(server: RunningServer, client: OpenAI) -> None:
    options: Any = {"model": "scripted", "tools": FLAT_TOOLS, "temperature": 0}
    first = client.responses.create(input="Roll a die.", **options)
    output: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "4"}
    by_items = client.responses.create(input=[user("Roll a die."), *first.output, output], **options)
    by_name = client.responses.create(input=[output], previous_response_id=first.id, **options)
    assert shown(by_items.output) == shown(by_name.output) == [("reasoning", AFTER_THOUGHT), ("message", ANSWER)]
    called = chat(client, [user("Roll a die.")]).choices[0].message
    again = chat(client, [user("Roll a die."), called, result(called.tool_calls[0], "4")])
    assert by_items.usage.input_tokens == by_name.usage.input_tokens == again.usage.prompt_tokens


@pytest.mark.parametrize(("asked", "thought", "content", "calls"), TURNS)
def test_messages(claude: Anthropic, asked: str, thought: str, content: str | None, calls: list[Any]) -> None:
    wanted: list[Any] = [("thinking", thought)]
    wanted += [("text", content)] if content else []
    wanted += [("tool_use", call) for call in calls]
    for more in ({}, {"speculation": "off"}):
        options: Any = {"extra_body": {"temperature": 0, **more}}
        options |= {"model": "scripted", "messages": [user(asked)], "max_tokens": 200, "tools": BLOCK_TOOLS}
        whole = claude.messages.create(**options)
        with claude.messages.stream(**options) as stream:
            final = stream.get_final_message()
        for message in (whole, final):
            assert [_block(block) for block in message.content] == wanted
            assert message.stop_reason == ("tool_use" if calls else "end_turn")


def _block(block: Any) -> tuple[str, Any]:
    if block.type == "tool_use":
        return block.type, (block.name, block.input)
    return block.type, block.thinking if block.type == "thinking" else block.text


def test_messages_go_on(claude: Anthropic, client: OpenAI) -> None:
    options: Any = {"extra_body": {"temperature": 0}, "model": "scripted", "max_tokens": 200, "tools": BLOCK_TOOLS}
    first = claude.messages.create(messages=[user("Roll a die.")], **options)
    results = [{"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "4"}]
    turns: Any = [user("Roll a die."), {"role": "assistant", "content": first.content}, user(results)]  # type: ignore[arg-type]
    last = claude.messages.create(messages=turns, **options)
    assert [_block(block) for block in last.content] == [("thinking", AFTER_THOUGHT), ("text", ANSWER)]
    called = chat(client, [user("Roll a die.")]).choices[0].message
    again = chat(client, [user("Roll a die."), called, result(called.tool_calls[0], "4")])
    assert last.usage.input_tokens + last.usage.cache_read_input_tokens == again.usage.prompt_tokens


def test_without_tools_a_call_is_text(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=[user("Roll a die.")], temperature=0)
    message = answer.choices[0].message
    assert message.content == json.dumps(ROLL[1]) and not message.tool_calls
    assert message.reasoning_content == THOUGHT  # type: ignore[attr-defined]


def test_custom_allowed_and_single_calls(client: OpenAI) -> None:
    check_custom_calls(client)
    check_allowed_tools(client, TOOLS, "say")
    check_only_one(client, TOOLS)


def test_an_answer_cut_anywhere_has_whole_calls_alone(client: OpenAI) -> None:
    assert check_cut_answers(client, "Roll a die.", range(1, 21), FLAT_TOOLS, "auto") == 2  # with its end, and without
    assert 1 < check_cut_answers(client, "Look and roll.", range(10, 30, 2), FLAT_TOOLS, "auto") < 10
