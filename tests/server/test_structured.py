"""Structured output through the server, with the client that people use: parsed answers, refusals, and bombs."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.server.running import RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about a cat, as JSON."}]


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    mood: Literal["calm", "wild"]
    age: Literal[1, 2, 3]
    likes_fish: bool


@pytest.fixture(scope="module")
def client(server: RunningServer) -> OpenAI:
    return OpenAI(base_url=server.base_url, api_key="none", max_retries=0)


def ask(server: RunningServer, **fields: object) -> Any:
    return server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60, **fields})


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_openai_parses_into_a_model(client: OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model="smollm2", messages=MESSAGES, response_format=Cat, temperature=temperature, n=3, seed=4, max_tokens=80
    )
    assert all(isinstance(choice.message.parsed, Cat) for choice in answer.choices)


def test_openai_streams_and_parses(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model="smollm2", messages=MESSAGES, response_format=Cat, temperature=0, max_tokens=80
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Cat)


def test_responses_parse_too(client: OpenAI) -> None:
    answer = client.responses.parse(
        model="smollm2", input="A cat, as JSON.", text_format=Cat, max_output_tokens=80, temperature=0
    )
    assert isinstance(answer.output_parsed, Cat)


SMALL = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_held_to(server: RunningServer, kind: str) -> None:
    """As llama.cpp and others take it."""
    answer = ask(server, response_format={"type": kind, "schema": SMALL}, temperature=2, seed=1).json()
    assert json.loads(answer["choices"][0]["message"]["content"])["n"] in (7, 8)
    text = {"format": {"type": kind, "name": "n", "schema": SMALL}}
    response = server.post("/v1/responses", {"input": "Hi", "text": text, "temperature": 2, "seed": 1}).json()
    assert json.loads(response["output"][0]["content"][0]["text"])["n"] in (7, 8)
    wrong = ask(server, response_format={"type": kind, "schema": {"type": "strig"}})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "response_format.schema"


def test_json_object(server: RunningServer) -> None:
    answer = ask(server, response_format={"type": "json_object"}, temperature=0, max_tokens=200).json()["choices"][0]
    if answer["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["message"]["content"]), dict)
    assert answer["message"]["content"].startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["tea", "milk"]}}, "tea|milk"),
        ({"guided_choice": ["tea", "milk"]}, "tea|milk"),
        ({"structured_outputs": {"json": {"enum": [7, "x"]}}}, '7|"x"'),
        ({"guided_json": '{"const": 7}'}, "7"),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, "ab"),
        ({"guided_grammar": 'start: "a" "b"'}, "ab"),
    ],
)
def test_extensions(server: RunningServer, fields: dict[str, object], pattern: str) -> None:
    assert re.fullmatch(pattern, ask(server, **fields).json()["choices"][0]["message"]["content"])
    plain = server.post("/v1/completions", {"prompt": "Answer: ", "max_tokens": 20, **fields}).json()
    assert re.fullmatch(pattern, plain["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strig"}}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
            "response_format.json_schema.strict",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"guided_grammar": "start: b"}, "guided_grammar"),
        ({"guided_grammar": 'start: "a" start'}, "guided_grammar"),
        ({"guided_grammar": "start: /((a{1,100}){1,100}){1,100}/"}, "guided_grammar"),
        ({"guided_regex": "((a{1,100}){1,100}){1,100}"}, "guided_regex"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "guided_regex"),
    ],
)
def test_refusals_name_the_field(server: RunningServer, fields: dict[str, object], param: str) -> None:
    answer = ask(server, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"inner": schema}}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "deep": {"guided_json": nested(400)},
    "wide": {"guided_json": {"enum": [f"word {number}" for number in range(50_000)]}},
    "doubling": {
        "guided_json": {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 4} for i in range(40)} | {"d40": {}},
        }
    },
    "regex": {"guided_regex": "(" * 2 + "[ab]{1,1000}" + "){1,1000}" * 2 + "c"},
    "lark": {"guided_grammar": "start: " + " ".join(["x?"] * 20_000) + '\nx: "a"'},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_answered_soon_and_the_server_lives(server: RunningServer, name: str) -> None:
    answer = ask(server, max_tokens=2, **BOMBS[name])
    assert answer.status_code in (200, 400), answer.text
    assert answer.elapsed.total_seconds() < 30  # a quiet machine: two at most
    assert ask(server, max_tokens=4, guided_choice=["a"]).json()["choices"][0]["message"]["content"] == "a"
    assert server.get("/health").status_code == 200


FOLLOWED_FOR_A_WHILE = {"guided_regex": "(a|b){60}c{99999999}", "max_tokens": 100}
"""What it asks for behind the first part goes beyond the matcher's limits."""


def test_a_grammar_that_fails_late_is_the_requests_own_fault(server: RunningServer) -> None:
    answer = ask(server, **FOLLOWED_FOR_A_WHILE)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["code"] == "grammar_error"
    assert "too many states" in error["message"]
    assert ask(server, max_tokens=4, guided_choice=["a"]).status_code == 200


def test_a_stream_whose_grammar_fails_late_ends_with_an_error_that_says_so(server: RunningServer) -> None:
    # The same grammar again: what one answer met is not held against the next.
    lines = ask(server, stream=True, **FOLLOWED_FOR_A_WHILE).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "choices" in events[0]
    assert events[-1]["error"]["type"] == "invalid_request_error" and events[-1]["error"]["code"] == "grammar_error"
