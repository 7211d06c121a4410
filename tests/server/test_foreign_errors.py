"""Errors of Anthropic's and Ollama's routes, in their shapes, as their own clients read them."""

from __future__ import annotations

import os
import signal
from typing import Any

import anthropic
import ollama
import pytest
from anthropic import Anthropic
from ollama import Client

from tests.server.running import CLIENT, RunningServer
from tests.server.test_anthropic import CALL, SEA, TEXT, TOOLS, ask
from tests.server.test_ollama import ask as ask_ollama


def test_names_that_the_operator_gave_the_model(scripted_server: RunningServer) -> None:
    scripted = Anthropic(base_url=scripted_server.address, api_key="none", max_retries=0)
    answer = ask(scripted, "Hi.", model="claude-of-tomorrow")
    assert answer.content[-1].text == TEXT and answer.model == "scripted"
    with pytest.raises(anthropic.NotFoundError, match="this server has 'scripted'"):
        ask(scripted, "Hi.", model="gpt-x")
    listed = scripted.models.list().data
    assert [(model.id, model.type, model.display_name) for model in listed] == [("scripted", "model", "scripted")]
    assert scripted.models.retrieve("scripted").created_at.year > 2020


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'image'"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "the user's turns"),
        ({"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "{"}]}, "user's turn"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "no tool_use"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "no name", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences holds 17"),
        ({"stop_sequences": [""]}, "stop_sequences must hold"),
        ({"temperature": 3}, "temperature"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)
def test_refusals_of_messages_name_the_field(
    scripted_server: RunningServer, fields: dict[str, Any], words: str
) -> None:
    body = {"model": "scripted", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi."}], **fields}
    body = {name: value for name, value in body.items() if value is not None}
    answer = scripted_server.post("/v1/messages", body)
    assert answer.status_code == 400, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat", {"options": {"num_ctx": 10**6}}, "options.num_ctx is 1000000, and this server's context is 8192"),
        ("chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("chat", {"options": {"stop": ["x"] * 17}}, "options.stop holds 17"),
        ("chat", {"options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"format": "xml"}, "format must be json or a JSON schema"),
        ("chat", {"format": {"type": "strig"}}, "format"),
        ("chat", {"think": "hard"}, "think must be"),
        ("chat", {"tools": [{"type": "web"}]}, "tools[0].type"),
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ("chat", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "user"}]},
            "messages[0].tool_calls[0]",
        ),
        ("chat", {"messages": [{"role": "user", "content": "x" * 9000}]}, "the prompt has"),
        ("chat", {"model": None}, "model is required"),
        ("generate", {"suffix": "b"}, "suffix is not supported"),
        ("generate", {"template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"context": [1, 2]}, "context is not supported"),
        ("generate", {"images": ["aGk="]}, "images is not supported"),
        ("generate", {"raw": True, "system": "a"}, "system"),
    ],
)
def test_refusals_of_ollamas_routes_name_the_field(
    scripted_server: RunningServer, path: str, fields: dict[str, Any], words: str
) -> None:
    asked = {"prompt": "a"} if path == "generate" else {"messages": [{"role": "user", "content": "a"}]}
    answer = scripted_server.post(f"/api/{path}", {"model": "scripted", **asked, **fields})
    assert answer.status_code == 400, answer.text
    assert isinstance(answer.json()["error"], str) and words in answer.json()["error"]


def test_a_model_that_is_not_there(scripted_server: RunningServer) -> None:
    client = Client(host=scripted_server.address)
    for unknown in ("qwen", "scripted:135m"):
        with pytest.raises(ollama.ResponseError, match="not found") as missing:
            client.chat(unknown, SEA)
        assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as missing:
        client.pull("qwen")
    assert missing.value.status_code == 404


def test_errors_are_of_the_classes_that_clients_know(keyed_server: RunningServer) -> None:
    clients = [Anthropic(base_url=keyed_server.address, api_key=key, max_retries=0) for key in ("wrong", "one", "two")]
    bearer = Anthropic(base_url=keyed_server.address, auth_token="two", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as refused:
        ask(clients[0], "Hi.")
    assert refused.value.type == "authentication_error"
    long: Any = {"prompt": "Hi.", "ignore_eos": True, "stream": True, "max_tokens": 8000, "speculation": "off"}
    address, headers = f"{keyed_server.address}/v1/completions", {"x-api-key": "one"}
    with CLIENT.stream("POST", address, json=long, headers=headers) as running:
        lines = running.iter_lines()
        assert running.status_code == 200 and next(lines)
        with pytest.raises(anthropic.RateLimitError) as limited:
            ask(clients[1], "Hi.")
        assert limited.value.type == "rate_limit_error" and limited.value.response.headers["retry-after"]
        assert ask(clients[2], "Hi.").content[-1].text == ask(bearer, "Hi.").content[-1].text == TEXT
    keyed_server.wait_until_idle(headers={"x-api-key": "one"})  # until it has heard that the stream was left
    with pytest.raises(anthropic.RequestTooLargeError) as large:
        ask(clients[2], "x" * 70_000)
    assert large.value.type == "request_too_large"
    with pytest.raises(anthropic.NotFoundError) as missing:
        clients[2].get("/v1/messages/batches", cast_to=object)
    assert missing.value.type == "not_found_error"


def test_keys_are_asked_for_as_elsewhere(keyed_server: RunningServer) -> None:
    for headers, words in (({}, "an API key is needed"), ({"Authorization": "Bearer no"}, "this API key is not known")):
        stranger = Client(host=keyed_server.address, headers=headers)
        for knock in (stranger.list, lambda client=stranger: client.chat("scripted", SEA)):
            with pytest.raises(ollama.ResponseError, match=words) as refused:
                knock()
            assert refused.value.status_code == 401
    known = Client(host=keyed_server.address, headers={"Authorization": "Bearer one"})
    assert known.list().models and ask_ollama(known, "Hi.").message.content == TEXT


def test_a_stream_that_breaks_says_why(keyed_server: RunningServer) -> None:
    """The engine is killed while an answer of each API is written."""
    headers = {"Authorization": "Bearer one"}
    keyed_server.wait_until_idle(headers=headers)
    anthropic_client = Anthropic(base_url=keyed_server.address, api_key="one", max_retries=0)
    ollama_client = ollama.Client(host=keyed_server.address, headers={"Authorization": "Bearer two"})
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2000}
    body: Any = {"format": {"type": "json_schema", "schema": schema}}
    with anthropic_client.messages.stream(
        model="scripted", max_tokens=8000, messages=SEA, output_config=body, extra_body={"speculation": "off"}
    ) as stream:
        lines = ollama_client.chat("scripted", SEA, format=schema, stream=True, options={"speculation": "off"})
        for _ in range(5):
            assert next(stream) and next(lines)
        os.kill(keyed_server.engine_pid(), signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError) as broken:
            list(stream)
        with pytest.raises(ollama.ResponseError, match="engine"):
            list(lines)
    assert broken.value.type == "overloaded_error" and "engine" in str(broken.value.api_message)
    keyed_server.wait_until(lambda: keyed_server.get("/health").status_code == 200)
    assert ask(anthropic_client, "Hi.").content[-1].text == TEXT
