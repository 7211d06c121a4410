"""Parts of a JSON schema as parts of a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twostroke.text.grammar import WHITESPACE


def json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def pattern_rule(schema: Mapping[str, Any]) -> str | None:
    """The regular expression that a whole string is held to; None: there is none, or it holds for a part of it."""
    pattern = schema.get("pattern")
    if not isinstance(pattern, str) or not pattern.startswith("^") or not pattern.endswith("$"):
        return None
    escaped, depth, in_set, written = False, 0, False, ""
    for character in pattern[1:-1]:
        if character == "/" and not escaped:
            written += "\\"
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif in_set or character == "[":
            in_set = character != "]"
        else:
            depth += (character == "(") - (character == ")")
            if character == "|" and depth == 0:
                return None  # its ends hold for one side each
        written += "\\n" if character == "\n" else character
    return None if escaped else f"/{written}/"  # escaped: the last sign is a dollar, and no end
