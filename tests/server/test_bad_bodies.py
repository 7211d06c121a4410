"""Bodies that are wrong in one way: what is said of it, in which shape, and how soon."""

from __future__ import annotations

import json
from collections.abc import Callable

import httpx
import pytest

from tests.server.running import CLIENT, RunningServer


def raw(content: bytes) -> Callable[[RunningServer], httpx.Response]:
    headers = {"Content-Type": "application/json"}
    return lambda server: CLIENT.post(f"{server.base_url}/chat/completions", content=content, headers=headers)


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        (b"", None, "the body is empty"),
        (b"{", None, "not valid JSON"),
        (b'"text"', None, "must be a JSON object"),
        (b'{"messages": "Hi"}', "messages", "valid list"),
        (b'{"messages": []}', "messages", "at least 1"),
        (b'{"messages": [{"role": "user"}]}', "messages", "messages[0].content is missing"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages", "image_url"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "stop": ["\\ud800"]}', "stop[0]", "surrogate"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": "hot"}', "temperature", "valid number"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}', "max_tokens", "greater than"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "top_logprobs": 2}', "top_logprobs", "logprobs"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"a": 1}}', "logit_bias", "token id"),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "logit_bias": {"70000": 1}}', "logit_bias", "70000"),
    ],
)
def test_messages_say_what_was_wrong_with_which_field(
    server: RunningServer, content: bytes, param: str | None, words: str
) -> None:
    response = raw(content)(server)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"] and error["param"] == param


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application", "json"])
def test_a_body_that_is_not_called_json_is_told_so(server: RunningServer, kind: str | None) -> None:
    """`curl -d` forgets it, and a page of another site may not say it unasked."""
    headers = {} if kind is None else {"Content-Type": kind}
    response = CLIENT.post(
        f"{server.base_url}/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
    )
    message = response.json()["error"]["message"]
    assert response.status_code == 415 and "Content-Type must be application/json" in message
    assert ("was not given" if kind is None else kind) in message


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/problem+json"])
def test_a_body_that_is_called_json_is_read(server: RunningServer, kind: str) -> None:
    headers = {"Content-Type": kind}
    response = CLIENT.post(
        f"{server.base_url}/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", {"format": {"type": "text", "note": ["\ud800"]}}),
        ("tools", [{"type": "function", "name": "roll", "description": "\udfff"}]),
        ("tool_choice", {"type": "none", "\ud800": 1}),
    ],
)
def test_what_a_response_repeats_can_be_sent(server: RunningServer, name: str, value: object) -> None:
    content = json.dumps({"input": "Hi", "max_output_tokens": 1, name: value})
    headers = {"Content-Type": "application/json"}
    response = CLIENT.post(f"{server.base_url}/responses", content=content, headers=headers)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith(name), response.text


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": [-1] * 250_000}, 400),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(number): "x" for number in range(30_000)}}, 400),
        ("/v1/chat/completions", {"messages": [1] * 250_000}, 400),
        ("/v1/completions", {"prompt": [1] * 250_000}, 400),
        ("/v1/completions", {"prompt": [1] * 2_000_000}, 413),
        ("/v1/chat/completions", {"messages": [[]] * 1_000_000}, 413),
        ("/tokenize", {"prompt": "a", "x": [{}] * 1_000_000}, 413),
    ],
)
def test_a_million_faults_are_one_error_and_take_no_time(
    server: RunningServer, path: str, body: dict, status: int
) -> None:
    worked_s = server.cpu_s()
    assert server.post(path, body).status_code == status
    assert server.cpu_s() - worked_s < 4


def test_unknown_fields_are_let_be(server: RunningServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi", "cache": {"x": 1}}],
        "max_tokens": 1,
        "user": "me",
        "foo": [],
    }
    assert server.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/none", 404), ("DELETE", "/health", 405)],
)
def test_unknown_routes_have_the_same_shape_of_error(
    server: RunningServer, method: str, path: str, status: int
) -> None:
    response = CLIENT.request(method, server.address + path)
    assert response.status_code == status and path in response.json()["error"]["message"]
