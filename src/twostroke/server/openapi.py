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
JSON_OR_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, its events.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    },
    **ERRORS,
}
