"""The commands, by name. Each file has one, and is imported only when it is the one that was typed, or for help."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from twostroke import __version__
from twostroke.cli.options import PanelCommand, expanded

COMMANDS = {
    "run": "Answer one prompt, then show what reading and writing cost.",
    "chat": "Talk with a model; each turn shows what the cache kept.",
    "embed": "Turn texts into vectors, or rank texts by a question.",
    "serve": "Serve a model with OpenAI's, Anthropic's and Ollama's APIs.",
    "fleet": "Run several servers behind a router, here or on Ray.",
    "demo": "Watch the two phases happen, in a browser.",
    "replay": "Play a recorded run, as a page or in a few lines.",
    "explain": "Say where a finished request's time went, and why.",
    "top": "Watch a running server.",
    "pull": "Fetch a model, or verify one that is here.",
    "inspect": "Show what a model is, and what of it fits here.",
    "bench": "Measure an engine; each figure stands beside its floor.",
    "lab": "Run the field's experiments here, and write a report.",
    "calibrate": "Learn what a step costs here, for better predictions.",
    "tune": "Find the fastest kernels for a model on this GPU.",
    "train-drafter": "Train a head that drafts for a model, on its own answers.",
    "plan": "Plan hardware: what fits, how fast, at what price.",
    "simulate": "Play a trace through the scheduler: what users would feel.",
}
"""Each with its line in the list of commands, which is not wrapped on 80 columns; its own --help says the rest."""

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
    module = name.replace("-", "_")
    command = expanded(getattr(import_module(f"twostroke.cli.{module}"), module))
    app.command(short_help=COMMANDS[name], cls=PanelCommand)(command)
