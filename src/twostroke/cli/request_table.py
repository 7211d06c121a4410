"""The latest finished requests as a table, for `twostroke top`: times, what was promised, the verdict on each."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twostroke.cli import units

SHOWN_REQUESTS = 12
TIME_CELLS = 7
SHORT_ID = 17
"""Characters of an id that are shown: enough for `twostroke explain`."""


def view(requests: list[dict[str, Any]], at: str = "") -> Group:
    """A line each, whatever the width; the latest verdict is told whole. `at`: the option that says where, if any."""
    choices = [(request["id"], choice) for request in requests for choice in request["choices"]]
    if not choices:
        return Group(Text("no request has finished yet"))
    causes = Counter(choice["timing"]["cause"] for _, choice in choices)
    found = ", ".join(f"{cause.replace('_', ' ')} {number}" for cause, number in causes.most_common())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("request", min_width=SHORT_ID, no_wrap=True)
    for name in ("TTFT", "TPOT", "total"):
        table.add_column(name, justify="right", min_width=TIME_CELLS, no_wrap=True)
    has_promises = any(choice["timing"].get("promised") is not None for _, choice in choices)
    if has_promises:
        table.add_column("class", no_wrap=True)
        table.add_column("promise", no_wrap=True)
    table.add_column("verdict", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, choice in choices[:SHOWN_REQUESTS]:
        timing = choice["timing"]
        times = (timing["ttft_s"], timing["decode"]["tpot_s"], timing["total_s"])
        promise = (timing["service_level"] or "-", _kept(timing["kept"])) if has_promises else ()
        table.add_row(Text(name[:SHORT_ID]), *map(units.seconds, times), *map(Text, promise), Text(timing["verdict"]))
    latest, verdict = choices[0][0], choices[0][1]["timing"]["verdict"]
    return Group(
        Text(f"latest {len(choices)}: {found}"),
        table,
        Text(),
        Text(f"{latest[:SHORT_ID]}: {verdict}."),
        Text(f"twostroke explain {latest[:SHORT_ID]}{at} has its timeline", style="dim"),
    )


def _kept(kept: dict[str, bool | None] | None) -> str:
    """`kept`, or which part of it was not."""
    if kept is None or (kept["ttft"] is None and kept["itl"] is None):
        return "-"
    broken = [name for name, phase in (("late", "ttft"), ("gaps", "itl")) if kept[phase] is False]
    return ", ".join(broken) or "kept"
