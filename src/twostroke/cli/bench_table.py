"""Benchmark results as tables: each figure beside what the hardware allows, and the share of it that was reached."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from twostroke.cli import units
from twostroke.cli.notes import say
from twostroke.cost.hardware import Ceilings
from twostroke.lab.bench import FigureSummary, WorkloadResult
from twostroke.lab.limits import Limits
from twostroke.lab.sizes import describe

SHORT_WORDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "out": "output", "s": "duration"}


def print_results(
    console: Console,
    results: Sequence[WorkloadResult],
    start: dict[str, float | None],
    ceilings: Ceilings,
    heading: str,
    repetitions: int,
) -> None:
    console.print(heading, highlight=False, markup=False, soft_wrap=True)
    spread = ["least..most"] if repetitions > 1 else []
    table = _table(["workload", "figure", "measured", *spread, "floor", "of floor"], left=2)
    for name, value_s in start.items():
        if value_s is not None:
            table.add_row("start", _words(name), units.seconds(value_s), *["" for _ in spread], "-", "-")
    for result in results:
        for number, summary in enumerate(result.figures):
            name = result.workload.NAME if number == 0 else ""
            figure = summary.typical
            table.add_row(
                name,
                _words(figure.name),
                quantity(figure.name, figure.value),
                *([_spread(summary)] if spread else []),
                "-" if figure.floor is None else quantity(figure.name, figure.floor),
                "-" if figure.fraction is None else f"{figure.fraction:.0%}",
            )
    console.print(table)
    for result in results:
        if result.skipped is not None:
            console.print(f"{result.workload.NAME}: skipped; {result.skipped}", highlight=False, markup=False)
    say(console, f"The floor is what this machine allows: {_rates(ceilings)} ({ceilings.source}).")
    for result in results:
        say(console, f"{result.workload.NAME}: {result.workload.MEASURES} ({describe(result.workload)})")


def print_limits(console: Console, limits: Limits) -> None:
    table = _table(["backend", "read", "multiply-adds", "FLOP/s", "how"], left=1)
    for ceilings in limits.ceilings:
        multiply_adds = ceilings.multiply_adds_per_s
        table.add_row(
            limits.backend,
            f"{units.size(ceilings.read_bytes_per_s)}/s",
            f"{_large(multiply_adds)}/s",
            _large(2 * multiply_adds),
            ceilings.source,
        )
    console.print(table)
    for name, value in limits.more.items():
        console.print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}", highlight=False)


def quantity(name: str, value: float) -> str:
    """A figure's value in the unit that its name ends in."""
    if name.endswith("_tok_s"):
        return f"{value:,.0f} tok/s" if value >= 100 else f"{value:.1f} tok/s"
    if name.endswith("_tok"):
        return f"{value:,.0f} tokens"
    return units.seconds(value / 1e3 if name.endswith("_ms") else value)


def _words(name: str) -> str:
    """`itl_p99_during_ms`: ITL p99 during."""
    for unit in ("_tok_s", "_tok", "_ms", "_s"):
        name = name.removesuffix(unit)
    return " ".join(SHORT_WORDS.get(word, word) for word in name.split("_"))


def _spread(summary: FigureSummary) -> str:
    name = summary.typical.name
    return f"{quantity(name, min(summary.values))}..{quantity(name, max(summary.values))}"


def _rates(ceilings: Ceilings) -> str:
    return f"{_large(ceilings.multiply_adds_per_s)} multiply-adds/s, {units.size(ceilings.read_bytes_per_s)}/s read"


def _large(value: float) -> str:
    return f"{value / 1e12:,.1f} T" if value >= 1e12 else f"{value / 1e9:,.0f} G"


def _table(names: list[str], left: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(names):
        is_text = number < left or name == "how"
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "how")
    return table
