"""`twostroke lab`: the experiments of the field on the user's own machine, as one page with plots and the raw numbers
beside it."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from twostroke.cli import options, units
from twostroke.cli.notes import check_place, plain_name, say, write
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError

if TYPE_CHECKING:
    from twostroke.lab.apparatus import Effort
    from twostroke.lab.finding import Finding
    from twostroke.lab.run import Progress as Told

CONFIG = EngineConfig(max_running=256)
NO_PACE_MS = 1e9
"""An ITL target that never binds: the chunk sizes are the experiment's to choose."""
LONGEST_CALIBRATION_S = 3600
MOST_RECORD_BYTES = 64 << 20

Model = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A model as `run` takes it; not needed with --from.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Smaller sizes and fewer repetitions: some two minutes.")]
Only = Annotated[
    str | None, typer.Option(metavar="LIST", help="Experiments, by name, with commas between; default: all.")
]
Page = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The page; default: lab-MODEL.html in this folder. The raw numbers go beside it, with the ending .json.",
    ),
]
Records = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Measure nothing: draw the numbers of an earlier run; several are joined, and kept beside the page.",
    ),
]
CalibrationSeconds = Annotated[
    float | None,
    typer.Option(
        help="How long to calibrate the cost model where `twostroke calibrate` stored nothing; 0: floors only. "
        "Default: 10 with --quick, else 20."
    ),
]
Plots = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write each plot there, too, as an SVG file.")]


def lab(
    model: Model = None,
    quick: Quick = False,
    only: Only = None,
    output: Page = None,
    from_records: Records = None,
    calibration_seconds: CalibrationSeconds = None,
    plots: Plots = None,
    config: EngineConfig = CONFIG,
    verbose: options.Verbose = False,
) -> None:
    """Run the experiments of the field on this machine and write one page: each plot has what was measured, what the
    cost model predicted, and a sentence on what it shows. Nothing is fetched when the page is opened.

    \b
    prefill-length   time to first token against prompt length
    decode-position  time per token against position
    phase-split      where a request's time goes, by its shape
    batch-size       throughput and time per token against the batch
    roofline         both phases against what the hardware allows
    kv-cache         with and without the KV cache
    kv-memory        KV bytes against context
    prefix-cache     with and without prefix caching
    chunk-size       a long prompt among streams: their gaps, its first token
    saturation       too many prompts: the queue grows while KV stays empty
    promise          promises kept against load: in order of arrival, and of what is due
    speculation      drafts: accepted length and speed, by text and batch

    Keep the machine quiet meanwhile: without --quick it takes some eight minutes on two cores. Ctrl-C ends it
    and shows what was found so far. Prompts are random and seeded, output lengths exact. Needs the extra [lab].
    """
    from twostroke.lab.draw import check_available
    from twostroke.lab.experiments import choose
    from twostroke.lab.run import INTERRUPTED

    notes = Console(stderr=True)
    check_available()
    choose(only)
    if (model is None) == (not from_records):
        raise BadRequestError("give a model to measure, or --from with the record of an earlier run: one of the two")
    page = output or _default_page(model or str(from_records and from_records[0]))
    _check_places(page, plots)
    if model is None:
        record = _joined([_read(path) for path in from_records or ()])
        _keep_joined(record, page, from_records or (), notes)
    else:
        if config.itl_target_ms is None:
            config = dataclasses.replace(config, itl_target_ms=NO_PACE_MS)
        record = _measure(model, config, only, _effort(quick, calibration_seconds), notes, verbose)
        write(notes, page.with_suffix(".json"), json.dumps(record, indent=1) + "\n")
    _show(record, page, plots, only, notes)
    if model is not None and any(finding["skipped"] == INTERRUPTED for finding in record["findings"]):
        raise typer.Exit(130)


def _default_page(source: str) -> Path:
    return Path(f"lab-{plain_name(Path(source).stem).removeprefix('lab-')}.html")


def _effort(quick: bool, calibration_s: float | None) -> Effort:
    from twostroke.lab.apparatus import QUICK, THOROUGH

    effort = QUICK if quick else THOROUGH
    if calibration_s is None:
        return effort
    if not 0.0 <= calibration_s <= LONGEST_CALIBRATION_S:
        raise BadRequestError(f"calibration_seconds must be from 0 to {LONGEST_CALIBRATION_S}, not {calibration_s}")
    return dataclasses.replace(effort, calibration_s=calibration_s)


def _measure(
    model: str, config: EngineConfig, only: str | None, effort: Effort, notes: Console, verbose: bool
) -> dict[str, Any]:
    from twostroke.engine.build import build
    from twostroke.lab.calibrated import calibrated_prediction
    from twostroke.lab.company import Company
    from twostroke.lab.experiments import choose
    from twostroke.lab.run import lab_record, run_experiments

    assembly = build(model, config, text=False)
    try:
        gc.collect()
        gc.freeze()  # as the server's engine process does
        for note in assembly.notes if verbose else ():
            say(notes, note)
        experiments = choose(only)
        with _bar(notes, len(experiments)) as told:
            prediction = calibrated_prediction(assembly, effort.calibration_s, lambda text: told(0, text))
            company = Company.now()
            findings = run_experiments(assembly, prediction, experiments, effort, told)
        record = lab_record(assembly, prediction, findings, effort, company.others_share())
    finally:
        assembly.engine.close()
    plain: dict[str, Any] = json.loads(json.dumps(record, default=str))  # what a reader of the file will see
    return plain


def _show(record: dict[str, Any], page: Path, plots: Path | None, only: str | None, notes: Console) -> None:
    from twostroke.lab.experiments import choose
    from twostroke.lab.report import html_report
    from twostroke.lab.run import findings_of

    names = {experiment.name for experiment in choose(only)}
    findings = [finding for finding in findings_of(record) if finding.name in names]
    _say(findings)
    if plots is not None:
        _write_plots(findings, plots, notes)
    write(notes, page, html_report(record, findings))


def _say(findings: Sequence[Finding]) -> None:
    """What was found, on standard output."""
    console = Console()
    for finding in findings:
        console.print(
            f"\n[bold]{finding.title}[/bold] [dim]({units.seconds(finding.duration_s)})[/dim]", highlight=False
        )
        text = finding.sentence if finding.skipped is None else f"not measured: {finding.skipped}"
        say(console, text, "")
        if finding.warning is not None:
            say(console, f"WARNING: {finding.warning}", "bold red")


@contextmanager
def _bar(notes: Console, total: int) -> Iterator[Told]:
    """A bar that is drawn between measurements only: a thread that draws meanwhile would be measured with the rest."""
    # What is at work gives way on a narrow terminal, never the clock.
    clock = TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00")))
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1))
    columns = (BarColumn(16), MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=5)), clock, text)
    with Progress(*columns, console=notes, auto_refresh=False, transient=True, expand=True) as bar:
        task = bar.add_task("", total=total)

        def told(done: int, text: str) -> None:
            bar.update(task, completed=done, description=text, refresh=notes.is_terminal)
            if not notes.is_terminal and ":" not in text:
                say(notes, text)

        yield told


def _write_plots(findings: Sequence[Finding], folder: Path, notes: Console) -> None:
    from twostroke.lab.draw import svg

    for finding in findings:
        if finding.chart is not None:
            write(notes, folder / f"{finding.name}.svg", svg(finding.chart))


def _read(path: Path) -> dict[str, Any]:
    from twostroke.lab.report import html_report
    from twostroke.lab.run import findings_of

    try:
        if path.stat().st_size > MOST_RECORD_BYTES:
            raise BadRequestError(f"{path} is too large for a record of `twostroke lab`")
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        findings_of(record)
        html_report(record, ())  # raises for whatever else is missing
    except OSError as error:
        raise BadRequestError(f"{path} could not be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRequestError(f"{path} could not be drawn: {_reason(error)}") from None
    return record


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _joined(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One record with the findings of all, in the report's order; the rest is the first's, and the last finding of a
    name counts."""
    from twostroke.lab.experiments import EXPERIMENTS

    found = {finding["name"]: finding for record in records for finding in record["findings"]}
    commands = dict.fromkeys(record["command"] for record in records)
    ordered = [found[name] for name in EXPERIMENTS if name in found]
    shares = [record["others_share"] for record in records]
    most = None if None in shares else max(shares)
    return {**records[0], "command": "; ".join(commands), "others_share": most, "findings": ordered}


def _keep_joined(record: dict[str, Any], page: Path, sources: Sequence[Path], notes: Console) -> None:
    if len(sources) < 2:
        return
    path = page.with_suffix(".json")
    if path.exists() and any(path.samefile(source) for source in sources):
        raise BadRequestError(f"{path} is one of the records to join: give the page another name")
    write(notes, path, json.dumps(record, indent=1) + "\n")


def _check_places(page: Path, plots: Path | None) -> None:
    check_place(page)
    if plots is not None and not plots.is_dir():
        raise BadRequestError(f"the folder {plots} does not exist")
