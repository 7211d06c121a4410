"""With and without the KV cache: without it, every token costs a prefill of all the text before it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus, CannotMeasureError
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import MILLISECONDS, Compared, Experiment, Say, chart, lines
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import Prediction, prefill_steps
from twostroke.lab.wording import duration, ratio

QUICK_SIZES, SIZES = ((128, 48), (32, 12), (8, 4)), ((256, 128), (64, 32), (8, 4))
"""Tokens in and out; the first that can be afforded."""


def measure(apparatus: Apparatus, say: Say) -> Finding:
    for prompt_len, out_len in QUICK_SIZES if apparatus.effort.is_quick else SIZES:
        works = [step for index in range(out_len) for step in _recompute(apparatus, prompt_len + index)]
        if prompt_len + out_len <= apparatus.max_tokens and apparatus.can_afford(works):
            break
    else:
        raise CannotMeasureError("recomputing every prefix would take too long here")
    prompt = apparatus.prompt(prompt_len)
    say(f"{out_len} tokens with the cache")
    apparatus.forget()
    stream, kept_tokens = apparatus.greedy(prompt, out_len)
    kept_s = [late_s - early_s for early_s, late_s in pairwise([stream.born_s, *stream.times_s])]
    recomputed_s: list[float] = []
    recomputed_tokens: list[int] = []
    for index in range(out_len):
        say(f"token {index + 1} of {out_len} without")
        apparatus.forget()
        alone, [token] = apparatus.greedy([*prompt, *recomputed_tokens], 1)
        recomputed_s.append(alone.ttft_s)
        recomputed_tokens.append(token)
    both = enumerate(zip(kept_tokens, recomputed_tokens, strict=True))
    same = next((index for index, (kept, again) in both if kept != again), out_len)  # what follows is another text
    return _finding(apparatus, prompt_len, kept_s, recomputed_s, same)


def _recompute(apparatus: Apparatus, length: int) -> list[StepWork]:
    return prefill_steps(length, apparatus.chunk_tokens)


Steps = Callable[[int], list[StepWork]]
"""Of the numbers of tokens, from 1 on, to the steps behind each."""


def _summed(steps: Steps) -> Steps:
    return lambda number: [work for earlier in range(1, number + 1) for work in steps(earlier)]


def _points(tone: Tone, values: list[float], label: str, scale: float, first: int = 1) -> Series:
    x = tuple(float(number) for number in range(first, len(values) + 1))
    return Series(tone, Mark.MEASURED, x, tuple(value * scale for value in values[first - 1 :]), label)


def _chart(prediction: Prediction, kept: Steps, again: Steps, kept_s: list[float], recomputed_s: list[float]) -> Chart:
    """Of the seconds of each token, with the cache and without."""
    numbers, written = list(range(1, len(kept_s) + 1)), Axis("answer so far (tokens)")
    return chart(
        prediction,
        Panel(
            written,
            Axis("time for this token (ms)", log=True),
            (
                _points(Tone.PREFILL, recomputed_s, "without cache:\na prefill each", MILLISECONDS),
                _points(Tone.DECODE, kept_s, "with cache:\na decode each", MILLISECONDS, first=2),
                *lines(prediction, Tone.PREFILL, numbers, again),
                *lines(prediction, Tone.DECODE, numbers[1:], kept),
            ),
        ),
        Panel(
            written,
            Axis("time since the request (s)"),
            (
                _points(Tone.PREFILL, list(accumulate(recomputed_s)), "without cache", 1.0),
                _points(Tone.DECODE, list(accumulate(kept_s)), "with cache", 1.0),
                *lines(prediction, Tone.PREFILL, numbers, _summed(again), lambda _, spent_s: spent_s),
                *lines(prediction, Tone.DECODE, numbers, _summed(kept), lambda _, spent_s: spent_s),
            ),
        ),
    )


def _finding(
    apparatus: Apparatus, prompt_len: int, kept_s: list[float], recomputed_s: list[float], same: int
) -> Finding:
    prediction, out_len = apparatus.prediction, len(kept_s)

    def kept(number: int) -> list[StepWork]:
        return _recompute(apparatus, prompt_len) if number == 1 else [StepWork(contexts=[prompt_len + number - 1])]

    def again(number: int) -> list[StepWork]:
        return _recompute(apparatus, prompt_len + number - 1)

    numbers = range(1, out_len + 1)
    works, seconds = [*map(kept, numbers), *map(again, numbers)], [*kept_s, *recomputed_s]
    verdict = "the same tokens" if same == out_len else f"the same {same} tokens, then rounding chose another"
    compared = Compared(prediction, seconds, works)
    return Finding(
        chart=_chart(prediction, kept, again, kept_s, recomputed_s),
        sentence=(
            f"Behind {prompt_len} tokens, writing {out_len} takes {duration(sum(kept_s))} with the KV cache and "
            f"{duration(sum(recomputed_s))} without, {ratio(sum(recomputed_s) / sum(kept_s))} as long, for {verdict}; "
            f"the last token alone takes {ratio(recomputed_s[-1] / kept_s[-1])} as long, for without the cache every "
            "token costs a prefill." + compared.clause
        ),
        method=(
            "Greedy decoding of the same prompt, twice. Without the cache every token is a request of its own: the "
            "whole text so far as its prompt, no prefix kept, one token out. The first token is a prefill either way; "
            "taking the likeliest token costs a little less than drawing one, as the calibration did."
        ),
        numbers={
            "prompt_tokens": prompt_len,
            "with_cache_s": kept_s,
            "without_cache_s": recomputed_s,
            "same_tokens": same,
            "prediction_error": compared.error,
        },
    )


EXPERIMENT = Experiment(
    "kv-cache",
    "With and without the KV cache",
    "What would decode cost if keys and values were not kept?",
    measure,
)
