"""A finished tool call for APIs that give arguments as an object, not as a text: read, or, where what the model wrote
is none, as what it said. Nobody can run such a call, but whoever reads it may see what went wrong."""

from __future__ import annotations

from typing import Any

import msgspec

from twostroke.server.response_items import Item


def arguments_of(call: Item) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(call.text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


def as_said(call: Item) -> str:
    return f'{{"name": {msgspec.json.encode(call.name).decode()}, "arguments": {call.text}}}'
