"""A fleet as tables: what was started, and what each worker does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from twostroke.cluster.fleet import Member
    from twostroke.cluster.status import Seen


def _table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    return table


def show_members(console: Console, members: Sequence[Member], model: str, router: str) -> None:
    table = _table("role", "address", "process", "model", numbers=("process",))
    for member in members:
        role, has = (f"router ({router})", "") if member.role is None else (member.role.value, model)
        table.add_row(role, member.url, str(member.child.pid), has)
    console.print(table)


def show_status(console: Console, url: str, workers: Sequence[Seen]) -> None:
    numbers = ("run", "wait", "KV", "tok/s", "cached")
    table = _table("role", "address", "health", *numbers, "model", numbers=numbers)
    for seen in workers:
        worker, load = seen.worker, seen.load
        health = {True: "ok", False: "not healthy", None: ""}[worker.is_healthy]
        row = [seen.role, worker.url, seen.trouble or health or "ok"]
        if load is None:
            row += [""] * len(numbers)
        else:
            row += [str(load.get("num_running_reqs", "")), str(load.get("num_waiting_reqs", ""))]
            row += [f"{load.get('token_usage', 0.0):.0%}", f"{load.get('gen_throughput', 0.0):.1f}"]
            row.append(f"{load.get('cache_hit_rate', 0.0):.0%}")
        table.add_row(*row, worker.model or "")
    count = f"{len(workers)} worker" + ("" if len(workers) == 1 else "s")
    console.print(f"{url}: {count}" if workers else f"{url}: the router has no worker")
    if workers:
        console.print(table)
