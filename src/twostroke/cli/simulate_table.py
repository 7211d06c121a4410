"""What a simulation gave, as a table and as a record."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from twostroke.cli import units
from twostroke.cli.simulate_pools import pools_lines, pools_record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twostroke.cost.classify import WorkloadClass
    from twostroke.planner.fleet.report import FleetReport
    from twostroke.planner.fleet.spec import FleetSpec
    from twostroke.planner.report import LevelReport, Objective, SimulationReport
    from twostroke.planner.simulate import ReplicaSpec

TIMES = {
    "ttft_s": ("TTFT", "arrival to the first token"),
    "queue_s": ("queue", "of it, waiting to be admitted"),
    "itl_s": ("ITL", "from one step's tokens to the next"),
    "tpot_s": ("TPOT", "mean over an answer's tokens after the first"),
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated, and where the seconds of its steps come from."""

    spec: ReplicaSpec
    title: str
    source: str
    note: str | None


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it."""

    report: SimulationReport
    objective: Objective
    simulated: Simulated
    replicas: int
    load: WorkloadClass | None
    took_s: float
    pools: FleetSpec | None = None
    """None: one pool."""
    fleet: FleetReport | None = None


def record(played: Played) -> dict[str, Any]:
    report, objective, simulated, load = played.report, played.objective, played.simulated, played.load
    share, per_s = report.goodput(objective)
    return {
        "deployment": simulated.title,
        "replicas": played.replicas,
        "step_seconds": simulated.source,
        "note": simulated.note,
        "requests": len(report.served.ttft_s),
        "refused": report.num_refused,
        "duration_s": report.duration_s,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "busy_share": report.busy_share,
        "preemptions": report.num_preemptions,
        "prefix_hit_tokens": report.prefix_hit_tokens,
        **{name: getattr(report, name) for name in TIMES},
        "goodput": {
            "ttft_s": objective.ttft_s,
            "tpot_s": objective.tpot_s,
            "share": share,
            "requests_per_s": per_s,
        },
        "load": None if load is None else _load_record(load),
        "policy": simulated.spec.policy,
        "levels": [asdict(level) for level in report.levels],
        **({} if played.pools is None or played.fleet is None else {"pools": pools_record(played.pools, played.fleet)}),
    }


def _load_record(load: WorkloadClass) -> dict[str, Any]:
    return {
        "bound": load.bound,
        "prefill_share": load.prefill_share,
        "mean_streams": load.batch,
        "advice": list(load.advice),
    }


def show(played: Played) -> None:
    console = Console()
    table = Table(box=None, pad_edge=False)
    table.add_column("felt")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, (title, meaning) in TIMES.items():
        values = getattr(played.report, name)
        table.add_row(title, *(units.seconds(values.get(part)) for part in ("p50", "p90", "p99")), meaning)
    console.print(table)
    if played.simulated.spec.promises_anything:
        console.print(_levels_table(played.report.levels))
    for line in _lines(played):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _levels_table(levels: Sequence[LevelReport]) -> Table:
    """A class a row: what was kept of its promises, and what its requests felt."""
    table = Table(box=None, pad_edge=False)
    for title in ("class", "requests", "kept", "goodput", "TTFT p50", "p99", "kept", "ITL p50", "p99", "kept"):
        table.add_column(title, justify="left" if title == "class" else "right")
    for level in levels:
        row = [level.name, f"{level.requests:,}", f"{level.kept_share:.1%}", f"{level.goodput_per_s:.2f}/s"]
        for felt_s, kept in ((level.ttft_s, level.kept_ttft_share), (level.itl_s, level.kept_itl_share)):
            row += [units.seconds(felt_s.get("p50")), units.seconds(felt_s.get("p99")), f"{kept:.1%}"]
        table.add_row(*row)
    return table


def _lines(played: Played) -> list[str]:
    report, objective, simulated, load = played.report, played.objective, played.simulated, played.load
    served, took_s = report.served, played.took_s
    lines = [
        f"{len(served.ttft_s):,} requests in {units.seconds(report.duration_s)}: {report.requests_per_s:.2f} a second, "
        f"{report.output_tokens_per_s:,.0f} output tokens/s, replicas busy {report.busy_share:.0%} of the time"
        + (f", {report.num_preemptions:,} preemptions" if report.num_preemptions else "")
        + (f", {report.num_refused:,} refused: too long" if report.num_refused else "")
        + (f", {report.num_late:,} refused: they would have been late" if report.num_late else "")
        + "."
    ]
    if objective.ttft_s is not None or objective.tpot_s is not None:
        share, per_s = report.goodput(objective)
        lines.append(f"Goodput: {share:.1%} met the objective, {per_s:.2f} requests/s.")
    if load is not None:
        lines.append(f"Bound by {'both phases' if load.bound == 'balanced' else load.bound}: {load.reason}.")
        lines.extend(f"{'    ' if index else 'So: '}{advice}" for index, advice in enumerate(load.advice))
    if played.pools is not None and played.fleet is not None:
        lines += pools_lines(played.pools, played.fleet)
    lines.append(f"{played.replicas} x {simulated.title}. Seconds of a step: {simulated.source}.")
    if simulated.note is not None:
        lines.append(f"Note: {simulated.note}.")
    lines.append(
        f"Simulated in {units.seconds(took_s)}, {len(served.ttft_s) / max(took_s, 1e-9):,.0f} requests a second."
    )
    return lines
