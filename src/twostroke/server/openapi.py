"""What the generated API description says of every route's answers."""

from __future__ import annotations

from typing import Any

_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERROR: dict[str, Any] = {"description": "What was wrong.", "content": {"application/json": {"schema": _ERROR_SCHEMA}}}

ERRORS: dict[int | str, dict[str, Any]] = {"4XX": _ERROR, "5XX": _ERROR}


def _json_or(kind: str) -> dict[int | str, dict[str, Any]]:
    kinds = {"application/json": {"schema": {"type": "object"}}, kind: {"schema": {"type": "string"}}}
    return {200: {"description": "The answer; with `stream`, its events.", "content": kinds}, **ERRORS}


JSON_OR_EVENTS = _json_or("text/event-stream")
JSON_OR_LINES = _json_or("application/x-ndjson")
