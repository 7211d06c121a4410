"""A streamed call has one entry in a chunk. Clients read a chunk's first entry, and lose what stands in a second."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.running import RunningServer

TOOL: dict[str, Any] = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    },
}
HELD = ['paint", "arguments": {"size', 'paint", "arguments": {\n    "size']
"""Stop strings that never come: what looks like their beginning is held back, and then comes in one piece."""


@pytest.mark.parametrize("stop", [None, HELD])
def test_a_chunk_has_one_entry_for_a_call(server: RunningServer, stop: list[str] | None) -> None:
    body = {
        "messages": [{"role": "user", "content": "Paint the door red."}],
        "tools": [{"type": "function", "function": TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "paint"}},
        "temperature": 0,
        "max_tokens": 100,
        "stream": True,
        "stop": stop,
    }
    lines = server.post("/v1/chat/completions", body).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    deltas = [choice["delta"].get("tool_calls") or [] for event in events for choice in event["choices"]]
    assert max(map(len, deltas)) == 1
    calls = [call for calls in deltas for call in calls]
    assert calls[0]["id"] and calls[0]["function"]["name"] == "paint"
    assert not any("id" in call for call in calls[1:])
    assert json.loads("".join(call["function"]["arguments"] for call in calls))["colour"] in ("red", "blue")
