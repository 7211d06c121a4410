"""`twostroke chat`: a conversation. Each turn sends the whole history again, and the line below it shows how much of it
the prefix cache had kept."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
from rich.console import Console

from twostroke.cache import cache_folder
from twostroke.cli import options, session
from twostroke.cli.line_editor import line_editor
from twostroke.cli.phase_table import turn_line
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.core.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves."
SAMPLING = SamplingParams(max_tokens=512, temperature=0.7, top_p=0.95)


def chat(
    model: options.Model,
    system: options.System = None,
    sampling: Annotated[SamplingParams, options.Without(("n", "logprobs", "prompt_logprobs"))] = SAMPLING,
    config: EngineConfig = options.OWN,
    service_level: options.ServiceLevel = "",
    history: Annotated[
        bool, typer.Option(help="Keep what you type, in the cache folder, for the arrow keys of later conversations.")
    ] = True,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model. After each turn a line shows both phases and the prefix-cache hit: history is read once.

    Lines can be edited, and earlier ones found with the arrow keys. A line that ends with a backslash goes on in the
    next; several lines that are pasted are one turn."""
    console = Console(stderr=True)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte is no reason to end a conversation
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages = list(opening)
    history_file = cache_folder() / "chat_history" if history else None
    with session.load(model, config, console, verbose=verbose) as llm, line_editor(history_file) as editor:
        console.print(HELP, style="dim", highlight=False)
        while (line := editor.read("> ")) is not None:
            if line in ("/exit", "/quit"):
                break
            if line == "/reset":
                messages = list(opening)
                console.print("The conversation is forgotten; its KV may still be in the cache.", style="dim")
                continue
            if line.startswith("/"):
                console.print(HELP, style="dim", highlight=False)
                continue
            if not line:
                continue
            turn = [*messages, {"role": "user", "content": line}]
            try:
                result = session.stream_answer(llm, llm.chat_token_ids(turn), sampling, console, service_level)
            except BadRequestError as error:
                console.print(
                    f"{error}. /reset starts a new conversation.", style="yellow", highlight=False, markup=False
                )
                continue
            except KeyboardInterrupt:
                console.print("\n(stopped; this turn is forgotten)", style="dim")
                continue
            messages = [*turn, {"role": "assistant", "content": result.text}]
            console.print(turn_line(result.timing), style="dim", highlight=False)
