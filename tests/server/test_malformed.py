"""Requests that no client should send, to every route that the server says it has: wrong types, huge numbers, broken
text, strange paths and methods. Only 4xx, and the engine lives."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from twostroke import LLM, SamplingParams
from twostroke.server.schemas import ChatBody

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "roll", "description": "Roll.", "parameters": {"type": "object", "properties": {}}},
}
DIAL: dict[str, Any] = {"syntax": "regex", "definition": "[0-9]+"}
SUM: dict[str, Any] = {"syntax": "lark", "definition": 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]/'}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "smollm2",
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "type": "custom", "custom": {"name": "sum", "input": "1"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stop": ["x"],
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "logit_bias": {"5": 1.0},
        "stream": False,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.1,
        "priority": 1,
        "cache_salt": "a",
        "chat_template_kwargs": {"enable_thinking": False},
        "tools": [
            TOOL,
            {"type": "custom", "custom": {"name": "sum", "format": {"type": "grammar", "grammar": SUM}}},
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "custom", "custom": {"name": "sum"}}]},
        },
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}},
    },
    "/v1/completions": {
        "model": "smollm2",
        "prompt": "Hi",
        "max_tokens": 1,
        "logprobs": 1,
        "echo": True,
        "best_of": 2,
        "suffix": "",
        "top_k": 3,
        "structured_outputs": {"regex": "[ab]"},
        "cache_salt": "a",
        "priority": 1,
    },
    "/v1/responses": {
        "model": "smollm2",
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "a", "name": "roll", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "b", "name": "dial", "input": "1"},
            {"type": "function_call_output", "call_id": "a", "output": "4"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "1"}]},
        ],
        "store": True,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 1,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}},
        "tools": [
            {"type": "function", **TOOL["function"]},
            {"type": "custom", "name": "dial", "format": {"type": "grammar", **DIAL}},
        ],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "dial"}]},
        "min_p": 0.1,
        "chat_template_kwargs": {},
        "stream_options": {"include_progress": True},
    },
    "/v1/messages": {
        "model": "smollm2",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "roll", "input": {"sides": 6}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "4"}]},
        ],
        "tools": [{"name": "roll", "description": "Roll.", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}},
        "stop_sequences": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "metadata": {"user_id": "me"},
    },
    "/v1/messages/count_tokens": {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {
        "model": "smollm2",
        "stream": False,
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "thinking": "Hm", "tool_calls": [{"function": {"name": "roll", "arguments": {}}}]},
            {"role": "tool", "tool_name": "roll", "content": "4"},
        ],
        "tools": [TOOL],
        "format": {"const": 1},
        "think": False,
        "keep_alive": "5m",
        "options": {"num_predict": 1, "temperature": 0.5, "stop": ["x"], "seed": 1, "num_ctx": 512, "min_p": 0.1},
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/api/generate": {
        "model": "smollm2",
        "prompt": "Hi",
        "system": "Hi",
        "stream": False,
        "format": {"const": 1},
        "options": {"num_predict": 1, "repeat_penalty": 1.1, "top_k": 3},
        "suffix": "",
        "raw": False,
        "context": [],
    },
    "/api/show": {"model": "smollm2"},
    "/tokenize": {"prompt": "Hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
}
NEVER_VALID = (
    *(10**400, -(10**30), 2**64, 1e308, -1, 0.5, float("nan"), float("inf")),
    *("", "\ud800", "\x00", "9" * 50, [], {}, [[]], [None], {"": None}, [{"role": 3}], [[[1]]], True),
    *([10**12], [-1], {"a": {"b": {"c": []}}}, ["\udfff"], "x" * 5000),
)
"""Not valid for most fields. (Where a field takes one of them after all, 200 is right too.)"""


def broken_bytes(random_source: random.Random, payload: bytes) -> bytes:
    """The same request with its bytes cut, doubled, or replaced by such as no UTF-8 has."""
    position = random_source.randrange(len(payload))
    kind = random_source.randrange(4)
    if kind == 0:
        return payload[:position]
    if kind == 1:
        return payload[:position] + bytes([random_source.choice((0x80, 0xC0, 0xFF, 0xED))]) + payload[position:]
    if kind == 2:
        return b"[" * random_source.choice((10, 1000, 100_000)) + payload
    return payload[:position] + payload


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    """As OpenAPI has it: `/v1/models/{name}`."""
    sound: dict[str, Any] | None
    """A body that means well; None where the route takes none."""


def routes_of(server: RunningServer) -> list[Route]:
    """Whatever there is, so that a route that is new is tried too."""
    document = server.get("/openapi.json").json()
    found = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = next(iter(content.values()), {}).get("schema")
            sound = GOOD.get(path) or (schema and sample(schema, document, depth=6))
            found.append(Route(method.upper(), path, sound or ({} if method in ("post", "put") else None)))
    return found


def sample(schema: dict[str, Any], document: dict[str, Any], depth: int) -> Any:
    """Some value that a schema describes, more or less: it is broken in a moment."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for branches in ("anyOf", "oneOf", "allOf"):
        if branches in schema:
            schema = schema[branches][0]
            return sample(schema, document, depth - 1) if depth else None
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        return {name: sample(field, document, depth - 1) for name, field in properties.items()} if depth else {}
    if kind == "array":
        return [sample(schema.get("items", {}), document, depth - 1)] if depth else []
    return {"string": "user", "integer": 1, "number": 0.5, "boolean": False}.get(kind or "")


def test_samples_are_as_their_schema_says() -> None:
    schema = ChatBody.model_json_schema(ref_template="#/components/schemas/{model}")
    made = sample(schema, {"components": {"schemas": schema["$defs"]}}, depth=6)
    assert made["messages"] == [{"role": "user", "content": "user"}] and made["stream"] is False
    assert set(made) > GOOD["/v1/chat/completions"].keys()


NEVER_A_NAME = (
    "..",
    ".",
    "%00",
    "%ff",
    "%2e%2e%2f",
    "a" * 3000,
    "%F0%9F%98%80",
    "last%0A",
    "{id}",
    "-1",
    "%",
    "%zz",
    "a;b",
)


def strange_path(random_source: random.Random, path: str) -> str:
    """With something in the place of each name; at times more, or less, than there is."""
    made = re.sub(r"\{[^}]*\}", lambda _: random_source.choice(NEVER_A_NAME), path)
    return made + random_source.choice(
        ("", "", "", "/", "?a=%ff", "?a[]=1&a", "/" + random_source.choice(NEVER_A_NAME))
    )


def mutated(random_source: random.Random, sound: dict[str, Any]) -> bytes:
    body = json.loads(json.dumps(sound)) or {"": None}
    for _ in range(random_source.choice((1, 1, 1, 2, 3))):
        field = random_source.choice(list(body))
        value = deepcopy(random_source.choice(NEVER_VALID))  # another change may go into it
        place, key = body, field
        # Of a field that holds others, mostly one of those, however deep.
        while isinstance(place[key], dict | list) and place[key] and random_source.random() < 0.7:
            place = place[key]
            key = random_source.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if field == "messages" and isinstance(place, dict) and place is not body and random_source.random() < 0.3:
            key = random_source.choice(("tool_calls", "name"))
        place[key] = value
    payload = json.dumps(body).encode()
    return broken_bytes(random_source, payload) if random_source.random() < 0.3 else payload


Case = tuple[str, str, bytes | None]


def malformed(random_source: random.Random, route: Route) -> Case:
    method, path = route.method, strange_path(random_source, route.path) if "{" in route.path else route.path
    if route.sound is None or random_source.random() < 0.05:
        if random_source.random() < 0.3:
            method = random_source.choice(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "BREW"))
        path = strange_path(random_source, route.path)
    return method, path, None if route.sound is None else mutated(random_source, route.sound)


def fuzz(server: RunningServer, number: int, seed: int, wanted: Callable[[str], bool] = bool) -> dict[int, int]:
    """How many answers had which status, of all routes alike; those with bodies mostly."""
    random_source, routes = random.Random(seed), [route for route in routes_of(server) if wanted(route.path)]
    weights = [1.0 if route.sound is None else 4.0 for route in routes]
    chosen = [*routes, *random_source.choices(routes, weights, k=number - len(routes))]
    cases = [malformed(random_source, route) for route in chosen]
    statuses: dict[int, int] = {}

    async def send_all() -> None:
        remaining = iter(cases)
        limits = httpx.Limits(max_connections=8)
        async with httpx.AsyncClient(base_url=server.address, timeout=60, limits=limits) as client:

            async def worker() -> None:
                for method, path, payload in remaining:
                    answer = await client.request(
                        method, path, content=payload, headers={"Content-Type": "application/json"}
                    )
                    statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                    check_answer(answer, f"{method} {path}: {(payload or b'')[:1500]!r}: {answer.text[:500]}")

            await asyncio.gather(*(worker() for _ in range(8)))

    asyncio.run(send_all())
    return statuses


def check_answer(answer: httpx.Response, what: str) -> None:
    assert answer.status_code < 500, what
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        error = answer.json()["error"]  # OpenAI's and Anthropic's is an object, Ollama's a sentence
        message = error["message"] if isinstance(error, dict) else error
        assert isinstance(message, str) and 0 < len(message) <= 1000, what
        assert isinstance(error, str) or error["type"], what


def check_alive(server: RunningServer, offline: LLM) -> None:
    answer = server.post("/v1/completions", {"prompt": "The sea is", "temperature": 0, "max_tokens": 8}).json()
    expected = offline.generate("The sea is", SamplingParams(temperature=0.0, max_tokens=8))[0].text
    assert answer["choices"][0]["text"] == expected
    assert server.metric("twostroke_engine_restarts_total") == 0
    server.wait_until_idle()


@pytest.mark.parametrize("path", GOOD)
def test_what_is_made_malformed_was_sound(server: RunningServer, path: str) -> None:
    answer = server.post(path, GOOD[path])
    assert answer.status_code == 200, answer.text


def test_hundreds_of_malformed_requests(server: RunningServer, offline: LLM) -> None:
    statuses = fuzz(server, 600, seed=1)
    assert sum(number for status, number in statuses.items() if status >= 400) > 400, statuses
    assert statuses[400] > 250, statuses
    check_alive(server, offline)


@pytest.mark.slow
@pytest.mark.parametrize("is_openai", [True, False])
def test_ten_thousand_malformed_requests(server: RunningServer, offline: LLM, is_openai: bool) -> None:
    others = ("/v1/messages", "/api/")
    statuses = fuzz(server, 10_000, seed=2, wanted=lambda path: path.startswith(others) is not is_openai)
    assert sum(number for status, number in statuses.items() if status >= 400) > 7000, statuses
    check_alive(server, offline)


def raw(content: bytes) -> Callable[[RunningServer], httpx.Response]:
    headers = {"Content-Type": "application/json"}
    return lambda server: httpx.post(f"{server.base_url}/chat/completions", content=content, headers=headers)


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
    response = httpx.post(
        f"{server.base_url}/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=headers
    )
    message = response.json()["error"]["message"]
    assert response.status_code == 415 and "Content-Type must be application/json" in message
    assert ("was not given" if kind is None else kind) in message


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/problem+json"])
def test_a_body_that_is_called_json_is_read(server: RunningServer, kind: str) -> None:
    headers = {"Content-Type": kind}
    response = httpx.post(
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
    response = httpx.post(f"{server.base_url}/responses", content=content, headers=headers, timeout=20)
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
    started_s = time.monotonic()
    assert server.post(path, body).status_code == status
    assert time.monotonic() - started_s < 4


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
    response = httpx.request(method, server.address + path)
    assert response.status_code == status and path in response.json()["error"]["message"]
