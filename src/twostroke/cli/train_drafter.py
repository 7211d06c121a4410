"""`twostroke train-drafter`: train an EAGLE-3 head for a model on the model's own answers, and say how long its drafts
hold."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cli import options
from twostroke.cli.notes import say
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, install_hint

if TYPE_CHECKING:
    from rich.progress import Progress

    from twostroke.training.loop import StepReport
    from twostroke.training.report import Held
    from twostroke.training.train import Watcher

_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 1_000_000),
    "texts_a_step": (1, 1024),
    "drafts": (1, 16),
    "answer_tokens": (2, 32_768),
    "text_tokens": (4, 131_072),
    "learning_rate": (1e-7, 1.0),
    "held_out": (0.001, 0.9),
    "save_every": (1, 1_000_000),
}


def train_drafter(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for run.")],
    out: Annotated[Path, typer.Option(help="The folder that the drafter is written to.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: text, one a paragraph, or JSON lines. Default: made from this package's documents."
        ),
    ] = None,
    most_prompts: Annotated[int | None, typer.Option(help="Take this many of the prompts; default: all.")] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 1000,
    texts_a_step: Annotated[int, typer.Option(help="Answers that a step learns from.")] = 4,
    drafts: Annotated[int, typer.Option(help="Tokens in a row that the head learns to draft.")] = 5,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256,
    text_tokens: Annotated[int, typer.Option(help="Tokens of a prompt and its answer, at most.")] = 1024,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Tokens that the head can draft; default: a sixth of the model's.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="At its highest.")] = 5e-4,
    held_out: Annotated[float, typer.Option(help="Share of the answers that the report is made from.")] = 0.1,
    save_every: Annotated[int, typer.Option(help="Steps between two states on disk.")] = 100,
    seed: Annotated[int, typer.Option(help="Of the weights that training begins with, and of its order.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu or cuda.")] = "auto",
    config: EngineConfig = options.OWN,
) -> None:
    """Train an EAGLE-3 head that drafts for a model, on the model's own answers. On a GPU this takes minutes.

    The same command again goes on where it was stopped. The folder is in EAGLE's published
    layout, and can be used with --speculate eagle3:FOLDER.

    Example: twostroke train-drafter smollm2 --out smollm2-eagle3
    """
    given = dict(locals())
    for name, (low, high) in _RANGES.items():
        if not low <= given[name] <= high:
            flag = name.replace("_", "-")
            raise BadRequestError(f"--{flag} must be from {low:g} to {high:g}, not {given[name]:g}")
    if find_spec("torch") is None:
        raise BadRequestError(f"training needs torch: {install_hint('train')}")
    from twostroke.engine.build import build
    from twostroke.training.loop import TrainingSettings
    from twostroke.training.prompts import own_prompts, read_prompts
    from twostroke.training.train import Job
    from twostroke.training.train import train_drafter as train

    conversations = (own_prompts() if prompts is None else read_prompts(prompts))[:most_prompts]
    settings = TrainingSettings(steps, learning_rate, drafts, texts_a_step, text_tokens, seed)
    job = Job(out, settings, answer_tokens, held_out, draft_vocab, device, save_every)
    console = Console(stderr=True)
    # Answers must be those of the model alone, and take their time: nobody drafts for them.
    assembly = build(model, replace(config, max_context=config.max_context or text_tokens))
    with _bars(console) as bars:
        report = train(assembly, conversations, job, _watcher(bars, console, steps))
    _show(Console(), report, out)


def _bars(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)


def _watcher(bars: Progress, console: Console, num_steps: int) -> Watcher:
    from twostroke.training.train import Watcher

    answering = bars.add_task("answers", total=None)
    training = bars.add_task("training", total=num_steps)
    every = max(1, num_steps // 20)

    def answered(done: int, total: int) -> None:
        bars.update(answering, completed=done, total=total)

    def trained(report: StepReport) -> None:
        right = " ".join(f"{share:.2f}" for share in report.right)
        bars.update(training, completed=report.step, description=f"training: loss {report.loss:.3f}")
        if report.step % every == 0 or report.step == num_steps:
            say(console, f"step {report.step}: loss {report.loss:.3f}, right drafts by place {right}")

    return Watcher(answered, trained, lambda sentence: say(console, sentence))


def _show(console: Console, report: list[Held], out: Path) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("drafter")
    for title in ("tokens a step", "tokens", "steps"):
        table.add_column(title, justify="right")
    for one in report:
        table.add_row(one.method, f"{one.accepted_length:.2f}", str(one.num_tokens), str(one.num_steps))
    console.print(table)
    say(console, f"On answers that were held out. Use it with: --speculate eagle3:{out}")
