"""A JSON schema as part of a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from twostroke.text.grammar import WHITESPACE


def json_rule(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
