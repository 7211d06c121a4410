"""Decode time per token against its position: the weights for every token, and a KV cache that grows."""

from __future__ import annotations

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import WARM_STEPS, Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Panel, Tone
from twostroke.lab.experiments.experiment import ROUNDS, Compared, Experiment, Say, between, chart, lines, measured
from twostroke.lab.finding import Finding
from twostroke.lab.wording import count, duration, size

QUICK_POSITIONS = (16, 250, 500, 1000, 2000, 3000, 4000)
POSITIONS = (16, 250, 500, 1000, 2000, 3000, 4000, 6000, 8000, 10_000)
QUICK_TOKENS, TOKENS = 16, 48


def measure(apparatus: Apparatus, say: Say) -> Finding:
    num_tokens = QUICK_TOKENS if apparatus.effort.is_quick else TOKENS
    wanted = QUICK_POSITIONS if apparatus.effort.is_quick else POSITIONS
    positions = apparatus.fitting(wanted, room=num_tokens + WARM_STEPS + 1)
    if len(positions) < 2:
        raise CannotMeasureError("two positions are needed, and there is no time or no room for them")
    text = apparatus.prompt(positions[-1])
    apparatus.forget()
    found: dict[int, Measured] = {}
    for _ in range(ROUNDS):
        for position in positions:
            say(f"{count(position)} tokens before")
            # Each prompt begins with the one before, so that only what is new of it has to be read.
            middle = position + WARM_STEPS + 1 + num_tokens // 2
            values = apparatus.decode_steps([text[:position]], num_tokens).values
            found[middle] = Measured((*(found[middle].values if middle in found else ()), *values))
    return _finding(apparatus, found)


def _one_step(context: int) -> list[StepWork]:
    return [StepWork(contexts=[context])]


def _finding(apparatus: Apparatus, found: dict[int, Measured]) -> Finding:
    prediction, shape, places = apparatus.prediction, apparatus.shape, list(found)
    seconds = [value.median for value in found.values()]
    works = [_one_step(place) for place in places]
    weights, kv_token = shape.weight_bytes_read(1), shape.kv_bytes_per_token
    growth = (
        "no dearer than at the start, as far as the bars tell"
        if seconds[-1] <= seconds[0] or not found[places[-1]].differs_from(found[places[0]])
        else f"{seconds[-1] / seconds[0] - 1:.0%} dearer, as the whole KV cache is read for every token"
    )
    compared = Compared(prediction, seconds, works)
    return Finding(
        chart=chart(
            prediction,
            Panel(
                Axis("position (tokens known)"),
                Axis("time per token (ms)"),
                (
                    measured(Tone.DECODE, places, found.values(), "decode"),
                    *lines(prediction, Tone.DECODE, between(places[0], places[-1]), _one_step),
                ),
            ),
        ),
        sentence=(
            f"A token costs {duration(seconds[0])} at position {count(places[0])} and {duration(seconds[-1])} at "
            f"{count(places[-1])}, {growth}: {size(weights)} of weights wherever it stands, and {size(kv_token)} of KV "
            f"for each token before it, which would equal the weights at {count(weights / kv_token)} tokens."
            + compared.clause
        ),
        method=(
            "One stream alone, behind random prompts of growing length; each prompt begins with the one before, which "
            "the prefix cache holds. Points are medians over the decode steps of several answers, bars the middle 80%; "
            f"the first {WARM_STEPS} steps after the prompt are left out."
        ),
        numbers={
            "position": places,
            "step_s": {place: value.values for place, value in found.items()},
            "weight_bytes": weights,
            "kv_bytes_per_token": kv_token,
            "prediction_error": compared.error,
        },
    )


EXPERIMENT = Experiment(
    "decode-position",
    "Decode time per token against position",
    "Does writing a token get dearer as the text behind it grows?",
    measure,
)
