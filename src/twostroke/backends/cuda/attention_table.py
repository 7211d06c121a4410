"""How attention's kernels are set: a table of rows, each with what it is for and what was fastest there when measured.
Knows rows and numbers; what a setting means is the kernel's to know."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

FILE = files("twostroke.backends.cuda") / "tuned" / "attention.json"


def settings_for(kernel: str, **facts: int) -> dict[str, Any]:
    """The settings of the first row of a kernel whose every range holds the fact of its name. A fact that is not told,
    as an interpreter's shared memory, is in any range. The last row of each kernel is for all else: the plain rule."""
    for row in _rows()[kernel]:
        ranges = ((facts[name], *ends) for name, ends in row["when"].items() if name in facts)
        if all(low <= fact and (high is None or fact <= high) for fact, low, high in ranges):
            return dict(row["use"])
    raise KeyError(f"no row of the table is for {kernel} of {facts}")


@cache
def _rows() -> dict[str, list[dict[str, Any]]]:
    return json.loads(FILE.read_text())
