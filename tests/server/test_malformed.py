"""Requests that no client should send, to every route that the server says it has: wrong types, huge numbers, broken
text, strange paths and methods. Only 4xx, and the engine lives."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer
from tests.server.sound_bodies import GOOD
from twostroke import LLM, SamplingParams
from twostroke.server.schemas import ChatBody

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
