"""`twostroke calibrate`: run a short spread of real steps, fit what each part of a step costs here, and keep it for the
engines and simulations to come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cli import options, units
from twostroke.cli.notes import say
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError

if TYPE_CHECKING:
    from twostroke.cost.calibration import Calibration
    from twostroke.engine.build import Assembly

PARTS = {
    "step_s": "any step",
    "prefill_s": "a step with prefill, on top",
    "weights_alone": "reading the weights, for one token",
    "weights": "reading the weights, for several",
    "matmul_in_shadow": "matrix products, while weights are read",
    "matmul": "matrix products, the rest",
    "attention": "attention of prompts",
    "kv": "reading the contexts of streams",
    "sampled": "the head and drawing a token",
}
LONGEST_S = 3600.0


def calibrate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model as `run` takes it.")] = "smollm2",
    seconds: Annotated[float, typer.Option(help="About how long to measure; a slow model sees less in it.")] = 20.0,
    config: EngineConfig = options.OWN,
) -> None:
    """Learn in seconds what a step of a model costs on this machine, for better predictions from the first step on.

    Measure while nothing else runs. If other programs are busy now, their load is taken for a part of this machine. A
    running engine goes on learning.

    Example: twostroke calibrate smollm2
    """
    if not 0.0 < seconds <= LONGEST_S:
        raise BadRequestError(f"seconds must be above 0 and at most {LONGEST_S:.0f}, not {seconds}")
    from twostroke.engine.build import build

    console = Console()
    assembly = build(model, config, text=False)
    try:
        found = _measure(assembly, seconds)
    finally:
        assembly.engine.close()
    _show(console, assembly, found)
    _store(console, assembly, found)


def _measure(assembly: Assembly, limit_s: float) -> Calibration:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from twostroke.engine.calibrate import fit, observe_spread

    ceilings = assembly.ceilings()
    columns = (TextColumn("measuring steps"), BarColumn(), TimeElapsedColumn())
    # Ten times a second would be ten times a second taken from what is measured: it moves between plays alone.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=1)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            bar.refresh()

        vocab_size = assembly.checkpoint.spec.vocab_size
        rounds = list(observe_spread(assembly.engine, vocab_size, limit_s, show))
    return fit(assembly.shape, ceilings, rounds)


def _show(console: Console, assembly: Assembly, found: Calibration) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("part of a step")
    table.add_column("costs", justify="right")
    for name, title in PARTS.items():
        value = getattr(found.coefficients, name)
        table.add_row(title, units.seconds(value) if name.endswith("_s") else f"{value:.2f} x its floor")
    table.add_row("the host, between steps", units.seconds(found.host_s))
    table.add_row("a newcomer, beside its steps", units.seconds(found.newcomer_s))
    table.add_row("and each 1,000 tokens of its prompt", units.seconds(1000 * found.newcomer_s_per_token))
    console.print(table)
    console.print(
        f"{assembly.checkpoint.name} on {assembly.backend_name}: predictions of {found.num_steps} steps are off by "
        f"{found.error:.1%} on average. Floors: {found.ceilings.multiply_adds_per_s / 1e9:,.0f} G multiply-adds/s, "
        f"{found.ceilings.read_bytes_per_s / 1e9:.1f} GB/s ({found.ceilings.source}).",
        highlight=False,
        markup=False,
    )


def _store(console: Console, assembly: Assembly, found: Calibration) -> None:
    path = assembly.preparation.calibration_path
    try:
        assembly.preparation.keep_calibration(found)
    except OSError as error:
        raise BadRequestError(f"the calibration could not be kept in {path.parent}: {error.strerror}") from None
    say(console, f"Kept for this model, backend and machine: {path}")
