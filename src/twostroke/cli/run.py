"""`twostroke run`: one prompt, its answer, its two phases."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options, session
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.engine.results import GenerationResult

if TYPE_CHECKING:  # whatever the answer does not wait for is imported behind it
    from twostroke.engine.floors import PhaseFloors
    from twostroke.engine.offline import LLM

DEFAULT_MAX_TOKENS = 256


def run(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; `-` or nothing reads it from standard input.")
    ] = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt as it is: no chat template.")] = False,
    max_tokens: options.MaxTokens = DEFAULT_MAX_TOKENS,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    backend: options.Backend = "auto",
    threads: options.Threads = None,
    max_context: options.MaxContext = None,
    kv_memory: options.KVMemory = None,
    kv_type: options.KVType = "auto",
    max_tokens_per_step: options.MaxTokensPerStep = None,
    quantise: options.Quantise = None,
    load: options.Load = "file",
    dtype: options.Dtype = "auto",
    decode_weights: options.DecodeWeights = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object with the answer and its timing.")
    ] = False,
    phases: Annotated[bool, typer.Option(help="Show the phase table.")] = True,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where the time went and why: a verdict and a timeline.")
    ] = False,
    verbose: options.Verbose = False,
) -> None:
    """Answer one prompt, streaming, then show its two phases: how long it read, how long it wrote, and the floors."""
    console = Console(stderr=True, quiet=as_json)
    config = options.engine_config(
        backend,
        threads,
        max_context,
        kv_memory,
        max_tokens_per_step,
        True,
        kv_type,
        quantise,
        load,
        dtype,
        decode_weights=decode_weights,
    )
    sampling = options.sampling_params(max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, stop)
    if raw and system is not None:
        raise BadRequestError("--raw uses no chat template, so there is no place for --system")
    text = _prompt_text(prompt)
    with session.load(model, config, console, verbose=verbose, chats=not raw) as llm:
        prompt_ids = _prompt_ids(llm, text, system, raw)
        if as_json:
            result = llm.generate(prompt_ids, sampling)[0]
            if result.error is not None:
                raise BackendError(result.error)
            print(json.dumps(_as_json(result, _floors(llm, result)), ensure_ascii=False))
            return
        result = session.stream_answer(llm, prompt_ids, sampling, console)
        if result.finish_reason == "length":
            console.print(f"(stopped at {len(result.token_ids)} tokens; --max-tokens sets the limit)", style="dim")
        if phases:
            from twostroke.cli.phase_table import print_phases

            print_phases(console, result.timing, _floors(llm, result), llm.assembly.ceilings())
        if explain:
            _print_explanation(console, result)


def _print_explanation(console: Console, result: GenerationResult) -> None:
    from twostroke.cli.explanation_view import print_explanation

    found = result.explain()
    start, stream = found.verdict.start, found.verdict.stream
    console.print()
    print_explanation(
        console,
        found.verdict.sentence,
        None if start is None else start.sentence,
        None if stream is None else stream.sentence,
        found.spans,
        is_fitted=found.is_fitted,
        doubt=found.doubt,
    )


def _prompt_text(prompt: str | None) -> str:
    if prompt is None and sys.stdin.isatty():
        raise BadRequestError("there is no prompt: give one as the second argument, or pipe it in")
    text = _standard_input() if prompt is None or prompt == "-" else prompt
    if not text.strip():
        raise BadRequestError("the prompt is empty")
    return text


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequestError(f"standard input is not UTF-8 text: byte {error.start} is not") from None


def _prompt_ids(llm: LLM, text: str, system: str | None, raw: bool) -> list[int]:
    if raw or (llm.tokenizer.chat_template is None and system is None):
        return llm.tokenizer.encode(text)
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_token_ids([*messages, {"role": "user", "content": text}])


def _floors(llm: LLM, result: GenerationResult) -> PhaseFloors:
    from twostroke.engine.floors import phase_floors

    return phase_floors(llm.assembly.shape, llm.assembly.ceilings(), result.timing)


def _as_json(result: GenerationResult, floors: PhaseFloors) -> dict[str, object]:
    timing = result.timing
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "timing": {
            "queue_s": timing.queue_s,
            "ttft_s": timing.ttft_s,
            "tpot_s": timing.tpot_s,
            "prompt_tokens": timing.prompt_tokens,
            "cached_tokens": timing.cached_tokens,
            "output_tokens": len(timing.token_times_s),
            "prefill_s": timing.prefill_s,
            "prefill_chunks": timing.prefill_chunks,
            "decode_s": timing.decode_s,
            "preemptions": timing.preemptions,
        },
        "floor": dataclasses.asdict(floors),
        "verdict": result.explain().verdict.sentence,
    }
