"""How attention's kernels are set: a table of rows, each with what it is for and what was fastest there when measured.
The package has one, of an H200; what `twostroke tune` measured on a card goes first there. What a setting means is the
kernel's to know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from twostroke.backends.cuda.tuned_table import file_name
from twostroke.cache import cache_folder, write_whole
from twostroke.core.errors import BackendError

FILE = files("twostroke.backends.cuda") / "tuned" / "attention.json"
Row = dict[str, Any]
"""`when`: a range of each fact, ends included, of which None is open; `use`: the settings."""


def settings_for(kernel: str, card: str = "", **facts: int) -> dict[str, Any]:
    """The settings of the first row of a kernel whose every range holds the fact of its name. A fact that is not told,
    as an interpreter's shared memory, is in any range. The last row of each kernel is for all else: the plain rule.
    `card`: a device's name, whose own rows go first."""
    for row in (*_own_rows(card).get(kernel, ()), *_rows()[kernel]):
        ranges = ((facts[name], *ends) for name, ends in row["when"].items() if name in facts)
        if all(low <= fact and (high is None or fact <= high) for fact, low, high in ranges):
            return dict(row["use"])
    raise KeyError(f"no row of the table is for {kernel} of {facts}")


@cache
def _rows() -> dict[str, list[Row]]:
    return json.loads(FILE.read_text())


@cache
def _own_rows(card: str) -> dict[str, list[Row]]:
    path = user_path(card)
    try:
        found = json.loads(path.read_text()) if card and path.is_file() else {}
        return {
            str(kernel): [{"when": dict(row["when"]), "use": dict(row["use"])} for row in rows]
            for kernel, rows in found.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BackendError(f"the table of tuned attention {path} cannot be read: {error}; delete it") from None


def user_path(card: str) -> Path:
    return cache_folder() / "tuned" / f"{file_name(card)}-attention.json"


def keep(card: str, found: Mapping[str, Sequence[Row]]) -> Path:
    """Ahead of what this user measured on the card before; a row for the same facts gives way. Raises OSError."""
    path, before = user_path(card), _own_rows(card)
    joined = {}
    for kernel in (*found, *(name for name in before if name not in found)):
        new = list(found.get(kernel, ()))
        known = [row["when"] for row in new]
        joined[kernel] = [*new, *(row for row in before.get(kernel, ()) if row["when"] not in known)]
    write_whole(path, json.dumps(joined, indent=1).encode())
    _own_rows.cache_clear()
    return path
