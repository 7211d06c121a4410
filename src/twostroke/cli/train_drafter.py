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

OWN_QUESTIONS = 2000
TOLD_EVERY = 0.05
"""Of the training, between two lines that say how it goes."""
_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, 1_000_000),
    "texts_a_step": (1, 1024),
    "drafts": (1, 16),
    "answer_tokens": (2, 32_768),
    "text_tokens": (4, 131_072),
    "learning_rate": (1e-7, 1.0),
    "held_out": (0.001, 0.9),
    "save_every": (1, 1_000_000),
    "questions": (0, 1_000_000),
    "minutes": (0.01, 100_000),
    "answer_minutes": (0.01, 100_000),
    "most_prompts": (2, 1_000_000),
    "draft_vocab": (1, 10_000_000),
    "seed": (0, 2**32 - 1),  # questions and answers are drawn with seeds that are made of it
}


def train_drafter(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model as `run` takes it.")],
    out: Annotated[Path, typer.Option(help="The folder that the drafter is written to.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts: text, one a paragraph, or JSON lines. Default: made from this package's documents, and "
            "questions that the model writes itself."
        ),
    ] = None,
    questions: Annotated[
        int | None,
        typer.Option(help="Prompts that the model writes itself; default: 2000, or none with --prompts."),
    ] = None,
    most_prompts: Annotated[int | None, typer.Option(help="Take this many of the prompts; default: all.")] = None,
    answer_minutes: Annotated[
        float | None,
        typer.Option(help="Time for questions and answers; those that have not begun by then are left out."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps, at most.")] = 1000,
    minutes: Annotated[float | None, typer.Option(help="Time for training; the rest of the steps is left out.")] = None,
    texts_a_step: Annotated[int, typer.Option(help="Answers that a step learns from.")] = 4,
    drafts: Annotated[int, typer.Option(help="Tokens in a row that the head learns to draft.")] = 5,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer, at most.")] = 256,
    text_tokens: Annotated[int, typer.Option(help="Tokens of a prompt and its answer, at most.")] = 1024,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Tokens that the head can draft; default: a sixth of the model's.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="The highest learning rate of the schedule.")] = 5e-4,
    held_out: Annotated[float, typer.Option(help="Share of the answers that the report is made from.")] = 0.1,
    save_every: Annotated[int, typer.Option(help="Steps between two states on disk.")] = 100,
    seed: Annotated[int, typer.Option(help="The seed of the first weights, and of the order of the answers.")] = 0,
    device: Annotated[str, typer.Option(help="Where to train: auto, cpu or cuda.")] = "auto",
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train no more: make the report of the head that is in the folder.")
    ] = False,
    config: EngineConfig = options.OWN,
) -> None:
    """Train an EAGLE-3 head that drafts for a model, on the model's own answers. On a GPU this takes minutes.

    If it was stopped, the same command goes on from there. The folder is in EAGLE's published layout, and can be used
    with --speculate eagle3:FOLDER. It holds a usable head from the first saved state on.

    Example: twostroke train-drafter smollm2 --out smollm2-eagle3
    """
    given = dict(locals())
    for name, (low, high) in _RANGES.items():
        if given[name] is not None and not low <= given[name] <= high:
            flag = name.replace("_", "-")
            raise BadRequestError(f"--{flag} must be from {low:,} to {high:,}, not {given[name]:,}")
    if find_spec("torch") is None:
        raise BadRequestError(f"training needs torch: {install_hint('train')}")
    from twostroke.training.loop import TrainingSettings
    from twostroke.training.prompts import own_prompts, read_prompts
    from twostroke.training.train import Job
    from twostroke.training.train import train_drafter as train

    conversations = (own_prompts() if prompts is None else read_prompts(prompts))[:most_prompts]
    most_s, answer_s = (None if given[name] is None else 60 * given[name] for name in ("minutes", "answer_minutes"))
    settings = TrainingSettings(steps, learning_rate, drafts, texts_a_step, text_tokens, seed, most_s)
    num_questions = questions if questions is not None else OWN_QUESTIONS if prompts is None else 0
    job = Job(
        out, settings, answer_tokens, held_out, draft_vocab, device, save_every, num_questions, answer_s, report_only
    )
    console = Console(stderr=True)
    own = replace(config, max_context=config.max_context or text_tokens)
    with _bars(console) as bars:
        report = train(model, own, conversations, job, _watcher(bars, console))
    _show(Console(), report, out)


def _bars(console: Console) -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console, transient=True)


def _watcher(bars: Progress, console: Console) -> Watcher:
    from twostroke.training.train import Watcher

    tasks = {name: bars.add_task(name, total=None) for name in ("questions", "answers")}
    training = bars.add_task("training", total=1.0)
    next_told = 0.0

    def answered(what: str, done: int, total: int) -> None:
        bars.update(tasks[what], completed=done, total=total, description=f"{what}: {done} of {total}")

    def trained(report: StepReport) -> None:
        nonlocal next_told
        bars.update(training, completed=report.share, description=f"training: loss {report.loss:.3f}")
        if report.share >= next_told:
            next_told = min(1.0, report.share + TOLD_EVERY)
            right = " ".join(f"{share:.2f}" for share in report.right)
            say(console, f"step {report.step}: loss {report.loss:.3f}, right drafts by place {right}")

    return Watcher(answered, trained, lambda sentence: say(console, sentence))


def _show(console: Console, report: list[Held], out: Path) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("drafter")
    places = [f"draft {place + 1}" for place in range(len(report[0].positions))]
    for title in ("tokens a step", "tokens", "steps", *places):
        table.add_column(title, justify="right")
    for one in report:
        shares = [f"{share:.0%}" for share in one.shares]
        table.add_row(one.method, f"{one.accepted_length:.2f}", str(one.num_tokens), str(one.num_steps), *shares)
    console.print(table)
    say(console, "On answers that were held out; of each draft, the share of steps in which it and all before it held.")
    say(console, f"Use it with: --speculate eagle3:{out}")
