"""One vocabulary of sampling for all routes; what is not there is refused by name."""

from __future__ import annotations

import json

import pytest

from tests.server.running import RunningServer


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "roll"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("web_search_options", {}),
    ],
)
def test_what_chat_does_not_have_is_refused_by_name(server: RunningServer, name: str, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", {**body, name: value})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == name and name in error["message"]
    assert server.post("/v1/chat/completions", {**body, name: None}).status_code == 200


def test_sampling_is_as_in_chat(server: RunningServer) -> None:
    """The same request in both words has the same answer, field by field."""
    question, written = "Name a colour.", set()
    for fields in (
        {"temperature": 0},
        {"seed": 7, "temperature": 1.5, "top_k": 50, "min_p": 0.01},
        {"temperature": 0, "stop": ["e"]},
        {"temperature": 0, "logit_bias": {"28": 50}, "priority": 1, "ignore_eos": True},
        {"temperature": 0, "frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 3},
    ):
        chat = {"messages": [{"role": "user", "content": question}], "max_tokens": 12, **fields}
        expected = server.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
        answer = server.post("/v1/responses", {"input": question, "max_output_tokens": 12, **fields}).json()
        assert "".join(part["text"] for item in answer["output"] for part in item["content"]) == expected, fields
        written.add(expected)
    assert len(written) == 5  # each field made a difference


def test_progress_is_an_event(server: RunningServer) -> None:
    body = {"input": "word " * 1200, "max_output_tokens": 2, "stream": True, "cache_salt": "progress"}
    asked = server.post("/v1/responses", {**body, "stream_options": {"include_progress": True}}).text
    events = [json.loads(line[6:]) for line in asked.splitlines() if line.startswith("data: ")]
    progress = [event["prefill_progress"] for event in events if event["type"] == "response.prefill_progress"]
    assert progress and all(0 < step["computed_tokens"] <= step["total_tokens"] for step in progress)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "prefill_progress" not in server.post("/v1/responses", body).text
