"""The commands, by name. Each file has one, and is imported only when it is the one that was typed, or for help."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from twostroke import __version__

COMMANDS = (
    "run",
    "chat",
    "serve",
    "explain",
    "top",
    "pull",
    "inspect",
    "bench",
    "lab",
    "calibrate",
    "plan",
    "simulate",
)

app = typer.Typer(
    name="twostroke",
    help=(
        "An LLM inference engine that names its two phases.\n\n"
        "PREFILL reads your prompt: compute-bound, felt as time to first token. "
        "DECODE writes the answer: bandwidth-bound, felt as time per output token. "
        "Every command shows which one you waited for, and how far it was from what this machine allows.\n\n"
        'Start with: twostroke run smollm2 "Why is the sky blue?"'
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"twostroke {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


typed = sys.argv[1:2]
for name in typed if typed and typed[0] in COMMANDS else COMMANDS:
    app.command()(getattr(import_module(f"twostroke.cli.{name}"), name))
