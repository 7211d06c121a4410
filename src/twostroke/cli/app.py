"""The commands, gathered. Each file registers one."""

from __future__ import annotations

import typer

from twostroke import __version__
from twostroke.cli.chat import chat
from twostroke.cli.inspect import inspect
from twostroke.cli.pull import pull
from twostroke.cli.run import run

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


for command in (run, chat, pull, inspect):
    app.command()(command)
