"""`twostroke run`: one prompt, its answer, its two phases."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options, session
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.results import GenerationResult

if TYPE_CHECKING:  # whatever the answer does not wait for is imported behind it
    from twostroke.engine.floors import PhaseFloors
    from twostroke.engine.offline import LLM

SAMPLING = SamplingParams(max_tokens=256, temperature=0.0)


def run(
    model: options.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; `-` or nothing reads it from standard input.")
    ] = None,
    system: options.System = None,
    raw: Annotated[bool, typer.Option(help="Continue the prompt as it is: no chat template.")] = False,
    sampling: SamplingParams = SAMPLING,
    config: EngineConfig = options.OWN,
    service_level: options.ServiceLevel = "",
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
    if raw and system is not None:
        raise BadRequestError("--raw uses no chat template, so there is no place for --system")
    text = _prompt_text(prompt)
    with session.load(model, config, console, verbose=verbose, chats=not raw) as llm:
        prompt_ids = _prompt_ids(llm, text, system, raw)
        if as_json:
            print(
                json.dumps(
                    _as_json(llm, _whole(llm, prompt_ids, sampling, service_level), sampling), ensure_ascii=False
                )
            )
            return
        if sampling.n == 1:
            result = session.stream_answer(llm, prompt_ids, sampling, console, service_level)
        else:
            result = _whole(llm, prompt_ids, sampling, service_level)
            for number, sample in enumerate(result.samples, 1):
                console.print(f"answer {number} of {sampling.n}", style="dim", highlight=False)
                print(sample.text, flush=True)
        cut = max((len(sample.token_ids) for sample in result.samples if sample.finish_reason == "length"), default=0)
        if cut:
            console.print(f"(stopped at {cut} tokens; --max-tokens sets the limit)", style="dim")
        if sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            from twostroke.cli.logprob_table import print_logprobs

            print_logprobs(console, llm.tokenizer, result)
        if phases:
            from twostroke.cli.phase_table import print_phases

            print_phases(console, result.timing, _floors(llm, result), llm.assembly.ceilings())
        if explain:
            _print_explanation(console, result)


def _whole(llm: LLM, prompt_ids: list[int], sampling: SamplingParams, service_level: str) -> GenerationResult:
    (result,) = llm.generate([prompt_ids], sampling, progress=False, service_level=service_level)
    for sample in result.samples:
        if sample.error is not None:
            raise BackendError(sample.error)
    return result


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
        promise=found.verdict.promise,
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


def _as_json(llm: LLM, result: GenerationResult, sampling: SamplingParams) -> dict[str, object]:
    timing, verdict = result.timing, result.explain().verdict
    told: dict[str, object] = {
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
        "floor": dataclasses.asdict(_floors(llm, result)),
        "verdict": verdict.sentence,
        "promise": verdict.promise,
    }
    if sampling.n > 1:
        told["samples"] = [
            {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason} for one in result.samples
        ]
    if sampling.logprobs is not None:
        told["logprobs"] = [[dataclasses.asdict(token) for token in sample.logprobs] for sample in result.samples]
    if sampling.prompt_logprobs is not None:
        told["prompt_logprobs"] = [dataclasses.asdict(token) for token in result.prompt_logprobs]
    return told
