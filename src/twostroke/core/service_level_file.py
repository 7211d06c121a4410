"""Service levels as an operator writes them: a TOML file with a table for each class. Every slip is one sentence that
names the file, the class and the field. Knows no server: what `[keys]` names is looked up there.

[levels.chat]            # a request names its class: "service_level": "chat"
ttft_ms = 500            # the first token, from arrival
itl_ms = 50              # the gap between two tokens, of 99% of an answer's gaps
weight = 2.0             # its share of a busy engine beside the others; 1 if not said
when_late = "refuse"     # or "queue", which is what is done if nothing is said

[keys]                   # which class the requests of an API key are of: its name, or its beginning and a *
alice = "chat"
"sk-batch-*" = "default"
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from twostroke.core.errors import BadRequestError
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels, WhenLate
from twostroke.core.setting import shown
from twostroke.core.toml_file import as_table, parse_toml, read_toml_text, refuse_unknown

FIELDS = ("ttft_ms", "itl_ms", "weight", "when_late")
MAX_MS = 3_600_000.0
"""An hour. A larger number is taken for a mistake."""
MAX_WEIGHT = 1000.0
NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
MAX_NAME = 64


def read_service_levels(path: str | Path) -> ServiceLevels:
    source = f"the service levels {path}"
    return parse_service_levels(read_toml_text(path, source), source)


def parse_service_levels(text: str, source: str = "the service levels") -> ServiceLevels:
    """Returns the service levels that a text describes. Raises BadRequestError, naming the place, for anything that is
    not as described above."""
    parsed = parse_toml(text, source)
    refuse_unknown(parsed, ("levels", "keys"), source)
    tables = as_table(parsed.get("levels", {}), f"{source}: levels")
    if not tables:
        raise BadRequestError(f"{source} name no class: write a table like [levels.chat] with ttft_ms = 500")
    levels = {name: _level(name, table, source) for name, table in tables.items()}
    default = levels.pop(DEFAULT_LEVEL, ServiceLevel(DEFAULT_LEVEL, is_derived=True))
    keys = as_table(parsed.get("keys", {}), f"{source}: keys")
    for key, name in keys.items():
        if name != DEFAULT_LEVEL and (not isinstance(name, str) or name not in levels):
            known = ", ".join([DEFAULT_LEVEL, *levels])
            raise BadRequestError(f"{source}: keys.{_named(key)} must be one of {known}, not {shown(name):.60}")
    return ServiceLevels((default, *levels.values()), keys)


def _level(name: str, table: Any, source: str) -> ServiceLevel:
    where = f"{source}: levels.{_named(name)}"
    if not 1 <= len(name) <= MAX_NAME or not NAME_CHARACTERS.issuperset(name):
        raise BadRequestError(f"{where}: a name has letters, digits, _ - and ., and at most {MAX_NAME} of them")
    given = as_table(table, where)
    refuse_unknown(given, FIELDS, where)
    when_late = given.get("when_late", "queue")
    if when_late not in get_args(WhenLate):
        raise BadRequestError(f"{where}.when_late must be one of queue, refuse, not {shown(when_late):.60}")
    ttft_ms, itl_ms = (_number(given, field, MAX_MS, where) for field in ("ttft_ms", "itl_ms"))
    weight = _number(given, "weight", MAX_WEIGHT, where)
    if when_late == "refuse" and ttft_ms is None:
        raise BadRequestError(f'{where}: when_late = "refuse" needs a ttft_ms, or nothing could be late')
    return ServiceLevel(
        name,
        None if ttft_ms is None else ttft_ms / 1e3,
        None if itl_ms is None else itl_ms / 1e3,
        1.0 if weight is None else weight,
        when_late,
    )


def _number(given: Mapping[str, Any], field: str, most: float, where: str) -> float | None:
    value = given.get(field)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0.0 < value <= most or math.isnan(value):
        raise BadRequestError(f"{where}.{field} must be a number above 0 and at most {most:g}, not {shown(value):.60}")
    return float(value)


def _named(name: str) -> str:
    return name if name and NAME_CHARACTERS.issuperset(name) and len(name) <= MAX_NAME else f"{name!r:.60}"
