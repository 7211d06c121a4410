"""`twostroke top`: a running server, live: what it reads and writes a second, who waits, what became of requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from twostroke.cli import fleet_client, request_table, server_client, top_fleet, units
from twostroke.cluster.status import Told
from twostroke.core.errors import BackendError
from twostroke.core.speculation import DrafterState
from twostroke.core.step_record import StepTotals


def top(
    url: server_client.Url = server_client.DEFAULT_URL,
    api_key: server_client.ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and leave.")] = False,
) -> None:
    """Watch a running server: prefill and decode rates, the queue, KV, and the verdict on each finished request.

    At a router's address it shows the workers of the fleet, a line for each, and the latest requests of all. The
    requests shown are those of the given API key. All other figures are the whole server's. Ctrl-C leaves.
    """
    before, before_s = _look(url, api_key), time.monotonic()
    console = Console(highlight=False, markup=False)
    if once:
        time.sleep(interval)
        console.print(_view(url, _look(url, api_key), before, time.monotonic() - before_s))
        return
    with Live(_view(url, before, before, 0.0), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now, now_s = _look(url, api_key), time.monotonic()
            live.update(_view(url, now, before, now_s - before_s), refresh=True)
            before, before_s = now, now_s


def _look(url: str, api_key: str | None) -> list[Told]:
    return fleet_client.ask(url, "/v1/twostroke/top", api_key)


def _view(url: str, now: list[Told], before: list[Told], elapsed_s: float) -> Group:
    alone = now[0].content
    if len(now) == len(before) == 1 and alone is not None and now[0].worker.url == server_client.base_of(url):
        return view(alone, before[0].content or alone, elapsed_s)
    return top_fleet.view(url, now, before, elapsed_s)


def view(now: dict[str, Any], before: dict[str, Any], elapsed_s: float) -> Group:
    try:
        parts = [Text(f"{now['model']} on {now['backend'] or '?'}: {now['state']}", style="bold")]
        if now["engine"] is not None:
            parts.append(Text("\n".join(_engine_lines(now, before, elapsed_s))))
        return Group(*parts, Text(), request_table.view(now["requests"]))
    except (KeyError, TypeError, IndexError) as error:
        raise BackendError(f"the server's snapshot could not be read: {error!r}") from None


def _engine_lines(now: dict[str, Any], before: dict[str, Any], elapsed_s: float) -> list[str]:
    engine = now["engine"]
    free, cached, used = (sum(group[state] for group in engine["blocks"]) for state in range(3))
    looked_up = engine["prefix_lookup_tokens"]
    hit_rate = f"{engine['prefix_hit_tokens'] / looked_up:.0%}" if looked_up else "-"
    backlog_s, full_s = engine.get("prefill_backlog_s"), engine.get("kv_full_s")
    taking = "" if not backlog_s else f", about {units.seconds(backlog_s)}"
    filling = "" if full_s is None else f" · full in about {units.seconds(full_s)}"
    return [
        _rates(engine, before["engine"] or engine, elapsed_s),
        f"running   {engine['running_prefill']} reading, {engine['running_decode']} writing of {now['max_running']}"
        f" · waiting {engine['waiting']} · {engine['prefill_backlog_tokens']:,} tokens to read{taking}",
        f"KV        {used / max(1, free + cached + used):.0%} held, {cached} of {free + cached + used} blocks cached"
        f" · prefix hits {hit_rate} · preemptions {engine['preemptions']}{filling}",
        *_drafter_lines(engine.get("drafters", ())),
        *_level_lines(engine.get("levels", ()), now.get("goodput", {})),
    ]


def _drafter_lines(drafters: Sequence[Sequence[Any]]) -> list[str]:
    """Of those that something is wrong with."""
    lines: list[str] = []
    for state in (DrafterState(*told) for told in drafters):
        said = []
        if state.is_doubted:
            said.append("hardly ever guesses right: most likely it was made for another model")
        if state.num_faults:
            out = ", and is asked no more for now" if state.is_out else ""
            said.append(f"failed {state.num_faults} times{out}: the server's log says how")
        if said:
            lines.append(f"drafter   {state.name} {' · '.join(said)}")
    return lines


def _level_lines(levels: Sequence[dict[str, Any]], goodput: dict[str, float]) -> list[str]:
    """What is left of each class's promise, by phase, and what was kept of late; of several classes, or of one that
    promises anything."""
    if len(levels) < 2 and not any(_headrooms(level) for level in levels):
        return []
    lines: list[str] = []
    for level in levels:
        parts = [f"{level['running']} running, {level['waiting']} waiting", *_headrooms(level)]
        parts.append(f"goodput {goodput.get(level['name'], 0.0):.2f}/s")
        lines.append(f"{'class' if not lines else '':<10}{level['name']}: {' · '.join(parts)}")
    return lines


def _headrooms(level: dict[str, Any]) -> list[str]:
    rooms = (("first token", level["ttft_headroom_s"]), ("gaps", level["itl_headroom_s"]))
    return [
        f"{name} {units.seconds(abs(left_s))} {'to spare' if left_s >= 0.0 else 'late'}"
        for name, left_s in rooms
        if left_s is not None
    ]


def _rates(engine: dict[str, Any], earlier: dict[str, Any], elapsed_s: float) -> str:
    """From the sums over all steps, as in `StepTotals`. The engine tells them every half second."""
    totals, before = engine["totals"], earlier["totals"]
    if totals is None:
        return "rates     no step yet"
    before = before or StepTotals()
    now = StepTotals(*totals)
    since = now.since(StepTotals(*before))
    if since.steps <= 0 or elapsed_s <= 0.0:
        idle = f"idle · {now.prefill_tokens:,} tokens read and {now.decode_tokens:,} written since it started"
        return f"rates     {idle}{_drafts(now)}"
    read, written = since.prefill_tokens / elapsed_s, since.decode_tokens / elapsed_s
    return (
        f"rates     read {read:,.0f} tok/s · write {written:,.0f} tok/s"
        f" · busy {min(1.0, since.compute_s / elapsed_s):.0%}\n"
        f"steps     {since.steps} of {units.seconds(since.compute_s / since.steps)}"
        f", {since.decode_slots / since.steps:.1f} streams each{_drafts(since)}"
    )


def _drafts(totals: StepTotals) -> str:
    if not totals.drafts_computed or not totals.decode_slots:
        return ""
    a_step = totals.decode_tokens / totals.decode_slots
    held = totals.drafts_held / totals.drafts_computed
    return f"\ndrafts    {totals.drafts_computed:,} computed, {held:.0%} held, {a_step:.2f} tokens a stream and step"
