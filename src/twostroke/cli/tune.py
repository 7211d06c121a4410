"""`twostroke tune`: measure on the card under us which kernel, cut how, computes the matrix products and the attention
of a model fastest, and keep that for the engines to come."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cli import options
from twostroke.core.errors import BadRequestError

if TYPE_CHECKING:
    from twostroke.backends.interface import TunableFactory, TuningReport
    from twostroke.core.formats import Formats
    from twostroke.models.checkpoint import Checkpoint

MOST_SHOWN = 20
LONGEST_S = 3600.0


def tune(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model as `run` takes it. Only its shape is used.")],
    backend: Annotated[str, options.engine_option("backend")] = "auto",
    load: Annotated[str, options.engine_option("load")] = "file",
    dtype: Annotated[str, options.engine_option("dtype")] = "auto",
    quantise: Annotated[str | None, options.engine_option("quantise")] = None,
    seconds: Annotated[
        float,
        typer.Option(
            help="About how long to measure. Kernels that were not reached by then keep their present choice."
        ),
    ] = 240.0,
    write: Annotated[
        Path | None, typer.Option(help="Also write all that is known of this device to a file, as the package has it.")
    ] = None,
) -> None:
    """Find the fastest kernels for a model's matrix products and attention on this GPU, in a few minutes.

    Measure while nothing else runs on the device. Engines read the result from the cache at their next start.

    Weights that are brought to fewer bits have kernels of their own: say which with --quantise, as for run.

    Example: twostroke tune Qwen/Qwen3-4B
    """
    if not 0.0 < seconds <= LONGEST_S:
        raise BadRequestError(f"seconds must be above 0 and at most {LONGEST_S:.0f}, not {seconds}")
    from twostroke import backends
    from twostroke.backends.interface import TunableFactory
    from twostroke.core.formats import FormatWish

    checkpoint = _shape(model, load)
    factory, _ = backends.choose(backend, checkpoint)
    if not isinstance(factory, TunableFactory):
        raise BadRequestError(f"the {factory.name} backend has nothing to tune: it chooses its kernels by itself")
    weights = None if quantise == "none" else quantise
    formats = factory.formats(checkpoint, FormatWish(weights, None if dtype == "auto" else dtype))
    if isinstance(formats, str):
        raise BadRequestError(f"{factory.name}: {formats}")
    report = _measure(factory, checkpoint, formats, seconds)
    console = Console()
    _show(console, report)
    if write is not None:
        try:
            write.write_text(report.table)
        except OSError as error:
            raise BadRequestError(f"the table could not be written to {write}: {error.strerror}") from None


def _shape(model: str, load: str) -> Checkpoint:
    from twostroke.models.loading import load_checkpoint
    from twostroke.models.random_weights import random_checkpoint
    from twostroke.models.resolve import resolve
    from twostroke.models.weights.tensor import WeightKind

    if load == "random":
        return random_checkpoint(Path(model), WeightKind.BF16, name=model)
    return load_checkpoint(resolve(model), name=model)


def _measure(factory: TunableFactory, checkpoint: Checkpoint, formats: Formats, seconds: float) -> TuningReport:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1)

        def show(done: int, total: int, product: str) -> None:
            bar.update(task, completed=done, total=total, description=product)

        return factory.tune(checkpoint, formats, seconds, show)


def _show(console: Console, report: TuningReport) -> None:
    gains = sorted(report.changes, key=lambda change: change.after_us / change.before_us)
    if gains:
        table = Table(box=None, pad_edge=False)
        for title in ("product", "rows", "before", "us", "now", "us"):
            table.add_column(title, justify="right" if title in ("rows", "us") else "left")
        for change in gains[:MOST_SHOWN]:
            times = (f"{change.before_us:.1f}", f"{change.after_us:.1f}")
            table.add_row(change.product, str(change.rows), change.before, times[0], change.after, times[1])
        console.print(table)
    saved_us = sum(change.before_us - change.after_us for change in gains)
    left_out = (
        f" {len(report.faults)} candidates did not run, or not rightly, and are left out." if report.faults else ""
    )
    console.print(
        f"{report.num_products} products measured on {report.device} in {report.seconds:.0f} s: {len(gains)} choices "
        f"changed, {saved_us:.0f} us less over all of them.{left_out}",
        highlight=False,
        markup=False,
    )
    for fault in report.faults[:MOST_SHOWN]:
        console.print(fault, style="dim", highlight=False, markup=False)
    console.print(f"Kept for engines on this device: {report.kept}", style="dim", highlight=False, soft_wrap=True)
