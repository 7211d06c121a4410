"""Answers of a model that writes in Harmony's channels, held to a format: the final message's text is, and a thought
before it is free. Its script opens another thought as often as it answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.server.response_cases import THOUGHT, Cat, check_events, shown, streamed
from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted

CHAT, CHATS = "/v1/chat/completions", [{"role": "user", "content": "A cat."}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "cat", "schema": Cat.model_json_schema()}}
HELD: dict[str, Any] = {"messages": CHATS, "response_format": SCHEMA, "max_tokens": 200}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("harmony")
    model = make_scripted(folder / "model", "harmony")
    with running_server(folder / "log", str(model), "--backend", "reference", "--name", "scripted") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0, timeout=120)


def is_thought(text: str | None) -> bool:
    """Of one message, or several."""
    return not text or set(text.split("\n\n")) == {THOUGHT}


def choices_of(server: RunningServer, body: dict[str, Any]) -> list[tuple[str | None, str | None, str]]:
    """Reasoning, content and how it ended."""
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    return [
        (choice["message"].get("reasoning_content"), choice["message"]["content"], choice["finish_reason"])
        for choice in answer.json()["choices"]
    ]


@pytest.mark.parametrize("more", [{}, {"speculation": "off"}], ids=["drafts", "no drafts"])
def test_the_final_message_is_held_and_a_thought_is_free(server: RunningServer, more: dict[str, Any]) -> None:
    found = choices_of(server, HELD | {"n": 8, "seed": 1} | more)
    for reasoning, content, reason in found:
        Cat.model_validate_json(content or "")
        assert is_thought(reasoning) and reason == "stop"
    assert any(reasoning for reasoning, _, _ in found) and not all(reasoning for reasoning, _, _ in found)


def test_it_streams_and_comes_again_on_a_prefix_hit(server: RunningServer, client: OpenAI) -> None:
    body = HELD | {"temperature": 0.7, "seed": 4, "n": 3}
    whole = choices_of(server, body)
    assert choices_of(server, body) == whole
    pieces = [["", ""] for _ in whole]
    for chunk in client.chat.completions.create(model="scripted", stream=True, **body):
        for choice in chunk.choices:
            pieces[choice.index][0] += getattr(choice.delta, "reasoning_content", None) or ""
            pieces[choice.index][1] += choice.delta.content or ""
    assert pieces == [[reasoning or "", content] for reasoning, content, _ in whole]


def test_parsed_by_the_client(client: OpenAI) -> None:
    messages: list[Any] = CHATS
    chat = client.chat.completions.parse(model="scripted", messages=messages, response_format=Cat, n=2)
    assert all(isinstance(choice.message.parsed, Cat) for choice in chat.choices)
    answer = client.responses.parse(model="scripted", input="A cat.", text_format=Cat)
    assert isinstance(answer.output_parsed, Cat) and shown(answer.output)[-1] == ("message", answer.output_text)
    events, final = streamed(client, input="A cat.", text_format=Cat)
    check_events(events, final)
    assert isinstance(final.output_parsed, Cat) and all(is_thought(text) for _, text in shown(final.output)[:-1])


@pytest.mark.parametrize(
    ("fields", "contents"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a|b/"}}, {"a", "b/"}),
        ({"structured_outputs": {"grammar": 'start: "}" | "{"'}}, {"{", "}"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}}, {"1"}),
    ],
)
def test_every_kind_of_grammar(server: RunningServer, fields: dict[str, Any], contents: set[str]) -> None:
    for reasoning, content, _ in choices_of(server, {"messages": CHATS, "n": 3, **fields}):
        assert content in contents and is_thought(reasoning)


def test_whoever_writes_the_messages_is_held_from_the_first_token(server: RunningServer) -> None:
    thought = '<|channel|> "analysis" <|message|> "Hm." <|end|> <|start|> "assistant"'
    own = f'start: {thought} <|channel|> "final" <|message|> "7"'
    assert choices_of(server, {"messages": CHATS, "structured_outputs": {"grammar": own}}) == [("Hm.", "7", "stop")]


def test_a_final_message_that_the_prompt_has_opened(server: RunningServer) -> None:
    for reasoning, content, _ in choices_of(server, HELD | {"chat_template_kwargs": {"has_opened": True}, "n": 2}):
        Cat.model_validate_json(content or "")
        assert reasoning is None


@pytest.mark.parametrize("max_tokens", range(1, 24))
def test_wherever_it_is_cut_no_marker_is_shown(server: RunningServer, max_tokens: int) -> None:
    for reasoning, content, reason in choices_of(server, HELD | {"max_tokens": max_tokens, "n": 4, "seed": max_tokens}):
        shown_text = (reasoning or "") + (content or "")
        assert "<|" not in shown_text and "assistant" not in shown_text
        assert reason == "length" or Cat.model_validate_json(content or "")


def test_a_stop_string_ends_a_thought_or_a_text(server: RunningServer) -> None:
    for reasoning, content, reason in choices_of(server, HELD | {"stop": ['"name"'], "n": 4, "seed": 2}):
        assert is_thought(reasoning) and '"name"' not in (content or "") and reason == "stop"
    for reasoning, content, reason in choices_of(server, HELD | {"stop": [" see"], "n": 6, "seed": 2}):
        assert (reasoning, content) == ("Let me", "") or (reasoning is None and json.loads(content or ""))
        assert reason == "stop"


def test_tools_beside_the_format(server: RunningServer) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    answer = server.post(CHAT, HELD | {"tools": [tool], "n": 3, "seed": 3})
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        message, was_cut = choice["message"], choice["finish_reason"] == "length"
        assert was_cut or message.get("tool_calls") or Cat.model_validate_json(message["content"])


def test_what_cannot_be_followed_is_refused_by_its_field(server: RunningServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strig"}}}
    answer = server.post(CHAT, HELD | {"response_format": schema})
    assert answer.status_code == 400 and "strig" in answer.text
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
