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
_ANTHROPIC_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}

Responses = dict[int | str, dict[str, Any]]


def _errors(schema: dict[str, Any]) -> Responses:
    error = {"description": "What was wrong.", "content": {"application/json": {"schema": schema}}}
    return {"4XX": error, "5XX": error}


def _json_or(kind: str, errors: Responses) -> Responses:
    kinds = {"application/json": {"schema": {"type": "object"}}, kind: {"schema": {"type": "string"}}}
    return {200: {"description": "The answer; with `stream`, its events.", "content": kinds}, **errors}


ERRORS = _errors(_ERROR_SCHEMA)
ANTHROPIC_ERRORS = _errors(_ANTHROPIC_ERROR_SCHEMA)
OLLAMA_ERRORS = _errors(_OLLAMA_ERROR_SCHEMA)
JSON_OR_EVENTS = _json_or("text/event-stream", ERRORS)
ANTHROPIC_EVENTS = _json_or("text/event-stream", ANTHROPIC_ERRORS)
OLLAMA_LINES = _json_or("application/x-ndjson", OLLAMA_ERRORS)
