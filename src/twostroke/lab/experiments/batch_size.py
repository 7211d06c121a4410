"""Throughput and TPOT against the batch: the weights are read once for all, so that each stream pays a little and all
together gain a lot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twostroke.cost.floor import StepWork, step_bytes_read, step_multiply_adds
from twostroke.lab.apparatus import WARM_STEPS, Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Panel, Tone
from twostroke.lab.experiments.experiment import ROUNDS, Compared, Experiment, Say, between, chart, lines, measured
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import prefill_steps
from twostroke.lab.wording import duration, flops_a_byte, rate, ratio

QUICK_BATCHES = (1, 2, 4, 8, 16, 32)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS, STEPS = 64, 12
MEAN_CONTEXT = PROMPT_TOKENS + WARM_STEPS + 1 + STEPS // 2
ENOUGH = 0.9
"""Of the widest batch's throughput: a smaller batch that has this much is as good a choice."""


def batches(apparatus: Apparatus) -> Iterable[int]:
    """Those that fit here and can be measured in the time there is."""
    for batch in QUICK_BATCHES if apparatus.effort.is_quick else BATCHES:
        length = PROMPT_TOKENS + STEPS + WARM_STEPS + 2 + apparatus.start_steps([range(PROMPT_TOKENS)] * batch)
        works = [*prefill_steps(PROMPT_TOKENS * batch, apparatus.chunk_tokens), *(STEPS * one_step(batch))]
        fits = batch <= apparatus.max_running and batch * length <= apparatus.pool_tokens
        if fits and length <= apparatus.max_tokens and apparatus.can_afford(works):
            yield batch


def one_step(batch: int) -> list[StepWork]:
    return [StepWork(contexts=[MEAN_CONTEXT] * batch)]


def measure_batch(apparatus: Apparatus, batch: int, *, more: bool = False) -> Measured:
    return apparatus.decode_batch(batch, PROMPT_TOKENS, STEPS, more=more)


def measure(apparatus: Apparatus, say: Say) -> Finding:
    found: dict[int, Measured] = {}
    for _ in range(ROUNDS):
        for batch in batches(apparatus):
            say(f"{batch} streams")
            found[batch] = measure_batch(apparatus, batch, more=True)
    if len(found) < 2:
        raise CannotMeasureError("two batch sizes are needed, and there is no time or no room for them")
    return _finding(apparatus, found)


def intensity(apparatus: Apparatus, batch: int) -> float:
    """FLOPs for each byte read."""
    work = one_step(batch)[0]
    return 2 * step_multiply_adds(apparatus.shape, work) / step_bytes_read(apparatus.shape, work)


def _finding(apparatus: Apparatus, found: dict[int, Measured]) -> Finding:
    prediction, sizes = apparatus.prediction, list(found)
    seconds = [value.median for value in found.values()]
    works = [one_step(batch) for batch in sizes]
    throughput = {batch: batch / value.median for batch, value in found.items()}
    rates = [Measured(tuple(batch / value for value in found[batch].values)) for batch in sizes]
    grid, widest = between(sizes[0], sizes[-1]), sizes[-1]
    enough = next(batch for batch in sizes if throughput[batch] >= ENOUGH * throughput[widest])
    streams = Axis("batch (streams decoding at once)", log=True, ticks=tuple(map(float, sizes)))
    compared = Compared(prediction, seconds, works)
    return Finding(
        chart=chart(
            prediction,
            Panel(
                streams,
                Axis("throughput (tokens/s)", log=True),
                (
                    measured(Tone.DECODE, sizes, rates, "all streams\ntogether", scale=1.0),
                    *lines(prediction, Tone.DECODE, grid, one_step, lambda batch, spent_s: batch / spent_s),
                ),
            ),
            Panel(
                streams,
                Axis("time per token (ms)", log=True),
                (
                    measured(Tone.DECODE, sizes, found.values(), "each stream"),
                    *lines(prediction, Tone.DECODE, grid, one_step),
                ),
            ),
        ),
        sentence=(
            f"{widest} streams write {rate(throughput[widest])} where one writes {rate(throughput[sizes[0]])}, "
            f"{ratio(throughput[widest] / throughput[sizes[0]])} as many, and each waits {duration(seconds[-1])} for a "
            f"token instead of {duration(seconds[0])}; arithmetic intensity grows from "
            f"{flops_a_byte(intensity(apparatus, sizes[0]))} to {flops_a_byte(intensity(apparatus, widest))} FLOP a "
            "byte. "
            + (
                f"{enough} streams have {ENOUGH:.0%} of that throughput already."
                if enough < widest
                else _beyond(sizes, rates)
            )
            + compared.clause
        ),
        method=(
            f"Different prompts of {PROMPT_TOKENS} tokens, all at once; only steps in which all streams decode and "
            f"nothing else happens count, {ROUNDS} times {STEPS}. Points are medians, bars the middle 80%."
        ),
        numbers={
            "batch": sizes,
            "step_s": {batch: value.values for batch, value in found.items()},
            "throughput_tok_s": throughput,
            "intensity_flop_per_byte": {batch: intensity(apparatus, batch) for batch in sizes},
            "prediction_error": compared.error,
        },
    )


def _beyond(sizes: Sequence[int], rates: Sequence[Measured]) -> str:
    """What the last two sizes allow to say of more streams."""
    if rates[-1].median > rates[-2].median and rates[-1].differs_from(rates[-2]):
        return "More streams would write more still."
    return f"Beyond {sizes[-2]} streams the bars tell no gain."


EXPERIMENT = Experiment(
    "batch-size",
    "Throughput and time per token against batch size",
    "What do streams that decode together gain, and what does each of them pay?",
    measure,
)
