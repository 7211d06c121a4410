"""`twostroke top` at a router's address: a line a worker, and the latest requests of all of them."""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from twostroke.cli import request_table
from twostroke.cluster.role import Role
from twostroke.cluster.status import Told
from twostroke.core.errors import BackendError
from twostroke.core.step_record import StepTotals

NUMBERS = ("read/s", "write/s", "busy", "reading", "writing", "waiting", "to read", "KV", "hits")


def view(url: str, now: list[Told], before: list[Told], elapsed_s: float) -> Group:
    earlier = {told.worker.url: told.content for told in before}
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("role", "worker", "state", *NUMBERS):
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    try:
        for told in now:
            table.add_row(
                told.worker.role.value, told.worker.url, *_cells(told, earlier.get(told.worker.url), elapsed_s)
            )
        requests = _requests(now)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise BackendError(f"a worker's snapshot could not be read: {error!r}") from None
    models = sorted({told.content["model"] for told in now if told.content})
    title = f"{url}: {len(now)} worker{'s' * (len(now) != 1)} of {', '.join(models) or 'no model that is known'}"
    return Group(Text(title, style="bold"), table, Text(), request_table.view(requests, f" --url {url}"))


def _cells(told: Told, before: dict[str, Any] | None, elapsed_s: float) -> list[str]:
    if told.content is None:
        return [told.trouble or "", *[""] * len(NUMBERS)]
    engine = told.content["engine"]
    if engine is None:
        return [str(told.content["state"]), *[""] * len(NUMBERS)]
    free, cached, used = (sum(group[state] for group in engine["blocks"]) for state in range(3))
    looked_up = engine["prefix_lookup_tokens"]
    counts = ("running_prefill", "running_decode", "waiting", "prefill_backlog_tokens")
    return [
        str(told.content["state"]),
        *_rates(engine, (before or {}).get("engine") or engine, elapsed_s),
        *(f"{engine[name]:,}" for name in counts),
        f"{used / max(1, free + cached + used):.0%}",
        f"{engine['prefix_hit_tokens'] / looked_up:.0%}" if looked_up else "-",
    ]


def _rates(engine: dict[str, Any], earlier: dict[str, Any], elapsed_s: float) -> list[str]:
    """Tokens read and written a second, and the share of the time that was computed."""
    if engine["totals"] is None or elapsed_s <= 0.0:
        return ["-"] * 3
    since = StepTotals(*engine["totals"]).since(StepTotals(*(earlier["totals"] or StepTotals())))
    if since.steps <= 0:
        return ["0", "0", "0%"]
    rates = (since.prefill_tokens / elapsed_s, since.decode_tokens / elapsed_s)
    return [*(f"{rate:,.0f}" for rate in rates), f"{min(1.0, since.compute_s / elapsed_s):.0%}"]


def _requests(now: list[Told]) -> list[dict[str, Any]]:
    """Of all workers, the latest first. Of two pools those that write have the timeline of both machines: what is known
    where prompts were read is left out."""
    has_writers = any(told.worker.role is not Role.PREFILL and told.content for told in now)
    found = [
        request
        for told in now
        if told.content is not None and not (has_writers and told.worker.role is Role.PREFILL)
        for request in told.content["requests"]
    ]
    return sorted(found, key=lambda request: request["ended"], reverse=True)
