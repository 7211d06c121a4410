"""Loading a model and streaming one answer to the terminal: what `run` and `chat` share."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from subprocess import Popen
from typing import TYPE_CHECKING

from rich.console import Console

from twostroke.cli import units
from twostroke.cli.word_wrap import writer_to
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.events import PrefillProgress
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.results import GenerationResult, Sample
from twostroke.text.chat_template import start_process
from twostroke.text.side_process import end_process

if TYPE_CHECKING:
    from twostroke.engine.offline import LLM

PROGRESS_FROM_TOKENS = 1024
"""Shorter prompts are read before a progress line could be."""


def load(model: str, config: EngineConfig, console: Console, *, verbose: bool, chats: bool = True) -> LLM:
    """`chats`: the chat template's process is started first of all, and comes up while the model is loaded."""
    check_has_text(config)
    started_s = time.perf_counter()
    process = start_process() if chats else None
    try:
        llm = _load_shown(model, config, console, process)
    except BaseException:
        if process is not None:
            end_process(process)
        raise
    checkpoint = llm.assembly.checkpoint
    console.print(
        f"{model}: {checkpoint.spec.family}, {checkpoint.num_parameters / 1e6:,.0f}M parameters, "
        f"{units.size(checkpoint.held_bytes(llm.assembly.formats.weights))} of weights, on {llm.assembly.backend_name} "
        f"with {llm.assembly.resolved.threads} threads, ready in {units.seconds(time.perf_counter() - started_s)}",
        style="dim",
        highlight=False,
        markup=False,
    )
    for note in llm.assembly.notes if verbose else llm.assembly.resolved.warnings:
        console.print(f"  {note}", style="dim", highlight=False, markup=False)
    return llm


def check_has_text(config: EngineConfig) -> None:
    if config.load == "random":
        raise BadRequestError("random weights have no tokenizer, so there is no text to show: use LLM with token ids")


def _load_shown(model: str, config: EngineConfig, console: Console, process: Popen[bytes] | None) -> LLM:
    from twostroke.engine.offline import LLM
    from twostroke.models.resolve import resolve

    def say(message: str) -> None:
        console.print(message, markup=False, highlight=False)

    resolve(model, progress=say)  # first, so that a download's own progress bar has the screen
    if not console.is_terminal:
        return LLM(model, config, template_process=process)
    from rich.text import Text

    with console.status(Text(f"loading {model}")):
        return LLM(model, config, template_process=process)


def stream_answer(
    llm: LLM, prompt_ids: Sequence[int], sampling: SamplingParams, console: Console, service_level: str = ""
) -> GenerationResult:
    """Print the answer as it is written; the result holds it whole."""
    result, write = GenerationResult("", None, tuple(prompt_ids), [Sample()]), writer_to(sys.stdout)
    shows_progress = console.is_terminal and len(prompt_ids) >= PROGRESS_FROM_TOKENS
    for event in llm.stream(prompt_ids, sampling, service_level=service_level):
        if isinstance(event, PrefillProgress):
            if shows_progress:
                console.print(f"\rreading {event.computed_tokens}/{event.total_tokens}", end="", style="dim")
            continue
        if shows_progress:
            console.print("\r" + " " * 40 + "\r", end="")
            shows_progress = False
        result.absorb(event)
        if event.text:
            write(event.text)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if result.error is not None:
        raise BackendError(result.error)
    result.explainer = llm.explainer
    return result
