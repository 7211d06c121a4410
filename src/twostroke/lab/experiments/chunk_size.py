"""Chunk size against the neighbours' ITL and the newcomer's TTFT: a long prompt arrives while streams decode."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import MILLISECONDS, Compared, Experiment, Say, chart, lines, measured
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import prefill_steps
from twostroke.lab.stage import Stage, Stream
from twostroke.lab.wording import count, duration

CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
STREAMS, STREAM_PROMPT = 4, 64
QUICK_LONG_PROMPTS, LONG_PROMPTS = (1000, 250, 60), (4000, 1000, 250, 60)
STEPS_BEFORE = 10
SPARE_STEPS = 4
"""A stream writes on for this many steps after the newcomer's first token, so that none ends while it is read."""
QUICK_STEPS, MOST_STEPS = 64, 256
"""A chunk that would need more steps than this is left out."""


def measure(apparatus: Apparatus, say: Say) -> Finding:
    wanted = QUICK_LONG_PROMPTS if apparatus.effort.is_quick else LONG_PROMPTS
    limit = QUICK_STEPS if apparatus.effort.is_quick else MOST_STEPS
    needed = STREAMS * (STREAM_PROMPT + STEPS_BEFORE + limit + SPARE_STEPS)
    if apparatus.max_running <= STREAMS or needed + wanted[-1] > apparatus.pool_tokens:
        raise CannotMeasureError(f"{STREAMS} streams and a prompt beside them do not fit here")
    prompts = [length for length in apparatus.fitting(wanted, room=1) if needed + length <= apparatus.pool_tokens]
    if not prompts:
        raise CannotMeasureError("there is no time for a prompt that is long enough")
    long_prompt = prompts[0]
    before: list[float] = []
    itl: dict[int, Measured] = {}
    ttft: dict[int, Measured] = {}
    try:
        for chunk in _chunks(apparatus, long_prompt, limit):
            say(f"chunks of {chunk}")
            apparatus.engine.scheduler.limit_chunks(chunk)
            gaps: list[float] = []
            ttft[chunk] = apparatus.repeat(partial(_play_once, apparatus, chunk, long_prompt, before, gaps))
            itl[chunk] = Measured(tuple(gaps))
    finally:
        apparatus.engine.scheduler.limit_chunks(None)
    if len(itl) < 2:
        raise CannotMeasureError("two chunk sizes are needed, and steps here are too small for them")
    return _finding(apparatus, long_prompt, Measured(tuple(before)), itl, ttft)


def _chunks(apparatus: Apparatus, long_prompt: int, most_steps: int) -> Iterable[int]:
    """Up to what a step takes beside the streams, and to the prompt itself."""
    largest = min(apparatus.chunk_tokens, long_prompt)
    sizes = [chunk for chunk in CHUNKS if chunk < largest and long_prompt / chunk <= most_steps]
    return [*sizes, largest]


def _chunk_beside(apparatus: Apparatus, chunk: int) -> int:
    """Prompt tokens that fit into a step beside the streams' slots."""
    return min(chunk, apparatus.engine.scheduler.config.max_tokens_per_step - STREAMS)


def _play_once(apparatus: Apparatus, chunk: int, long_prompt: int, before: list[float], during: list[float]) -> float:
    """The newcomer's TTFT; the streams' gaps before it came and while it was read are added to the lists."""
    num_steps = -(-long_prompt // _chunk_beside(apparatus, chunk))
    prompts = [apparatus.prompt(STREAM_PROMPT) for _ in range(STREAMS)]
    newcomer = apparatus.prompt(long_prompt)
    apparatus.forget()
    out_len = STEPS_BEFORE + STREAMS * -(-STREAM_PROMPT // chunk) + num_steps + SPARE_STEPS

    def begin(stage: Stage) -> None:
        streams = [stage.add(prompt, out_len) for prompt in prompts]
        while not all(stream.times_s for stream in streams):
            stage.step()
        for _ in range(STEPS_BEFORE):
            stage.step()
        stage.add(newcomer, 1)

    *streams, late = apparatus.perform(begin).streams
    both = max(stream.steps[0] for stream in streams)
    for stream in streams:
        before.extend(_gaps(stream, both + 1, late.born_step))
        during.extend(_gaps(stream, late.born_step + 2, late.steps[0]))  # a step was in flight when it came
    return late.ttft_s


def _gaps(stream: Stream, first_step: int, last_step: int) -> list[float]:
    """Between this stream's tokens, where the later one came in these steps."""
    times, steps = stream.times_s, stream.steps
    return [times[i] - times[i - 1] for i in range(1, len(times)) if first_step <= steps[i] <= last_step]


def _reading(apparatus: Apparatus, long_prompt: int, chunk: int) -> list[StepWork]:
    contexts = [STREAM_PROMPT + STEPS_BEFORE] * STREAMS
    return prefill_steps(long_prompt, _chunk_beside(apparatus, chunk), contexts=contexts)


def _chart(
    apparatus: Apparatus, long_prompt: int, before: Measured, itl: dict[int, Measured], ttft: dict[int, Measured]
) -> Chart:
    prediction, sizes = apparatus.prediction, list(itl)

    def reading(chunk: int) -> list[StepWork]:
        return _reading(apparatus, long_prompt, chunk)

    def middle(chunk: int) -> list[StepWork]:
        steps = reading(chunk)
        return [steps[len(steps) // 2 if len(steps) > 2 else 0]]

    chunks = Axis("largest chunk of the newcomer's prompt (tokens)", log=True, ticks=tuple(map(float, sizes)))
    before_ms = before.median * MILLISECONDS
    quiet = Series(Tone.PLAIN, Mark.LIMIT, (sizes[0], sizes[-1]), (before_ms, before_ms), "ITL before\nit came")
    gaps = measured(Tone.DECODE, sizes, itl.values(), "ITL while\nit is read")
    starts = measured(Tone.PREFILL, sizes, ttft.values(), "TTFT")
    return chart(
        prediction,
        Panel(
            chunks,
            Axis("neighbours' ITL (ms)", log=True),
            (gaps, *lines(prediction, Tone.DECODE, sizes, middle), quiet),
        ),
        Panel(
            chunks,
            Axis("newcomer's TTFT (ms)", log=True),
            (starts, *lines(prediction, Tone.PREFILL, sizes, reading)),
        ),
    )


def _finding(
    apparatus: Apparatus, long_prompt: int, before: Measured, itl: dict[int, Measured], ttft: dict[int, Measured]
) -> Finding:
    sizes = list(itl)
    small, large = sizes[0], sizes[-1]
    works = [_reading(apparatus, long_prompt, chunk) for chunk in sizes]
    compared = Compared(apparatus.prediction, [ttft[chunk].median for chunk in sizes], works)
    return Finding(
        chart=_chart(apparatus, long_prompt, before, itl, ttft),
        sentence=(
            f"While a prompt of {count(long_prompt)} tokens is read in chunks of {large}, its {STREAMS} neighbours "
            f"wait {duration(itl[large].median)} for a token, {duration(itl[large].most)} at worst; in chunks of "
            f"{small}, {duration(itl[small].median)} and {duration(itl[small].most)} (alone: "
            f"{duration(before.median)}). The newcomer's TTFT is {duration(ttft[small].median)} in small chunks and "
            f"{duration(ttft[large].median)} in large ones." + compared.clause
        ),
        method=(
            f"{STREAMS} streams decode behind prompts of {STREAM_PROMPT} tokens; then the long prompt arrives, and a "
            "step may take no more of it than the chunk size (the inter-token target is off). ITL is every gap between "
            "two tokens of a neighbour while the newcomer is read: points are medians, bars the middle 80%. The "
            "prediction's error is that of TTFT."
        ),
        numbers={
            "long_prompt_tokens": long_prompt,
            "chunk_tokens": sizes,
            "itl_before_s": before.median,
            "itl_s": {chunk: [value.low, value.median, value.most] for chunk, value in itl.items()},
            "ttft_s": {chunk: value.values for chunk, value in ttft.items()},
            "prediction_error": compared.error,
        },
    )


EXPERIMENT = Experiment(
    "chunk-size",
    "A long prompt among running streams, by chunk size",
    "How finely should a prompt be cut so that others keep streaming, and what does that cost it?",
    measure,
)
