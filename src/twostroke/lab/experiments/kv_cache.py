"""With and without the KV cache: without it, every token costs a prefill of all the text before it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus
from twostroke.lab.chart import Axis, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import (
    MILLISECONDS,
    CannotMeasureError,
    Experiment,
    Say,
    chart,
    error_of,
    judged,
    lines,
)
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import prefill_steps
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
    kept_s = [at_s - stream.born_s for at_s in stream.times_s]
    recomputed_s: list[float] = []
    recomputed_tokens: list[int] = []
    for index in range(out_len):
        say(f"token {index + 1} of {out_len} without")
        apparatus.forget()
        alone, [token] = apparatus.greedy([*prompt, *recomputed_tokens], 1)
        recomputed_s.append(alone.ttft_s)
        recomputed_tokens.append(token)
    same = sum(1 for kept, again in zip(kept_tokens, recomputed_tokens, strict=True) if kept == again)
    return _finding(apparatus, prompt_len, kept_s, recomputed_s, same)


def _recompute(apparatus: Apparatus, length: int) -> list[StepWork]:
    return prefill_steps(length, apparatus.chunk_tokens)


def _finding(
    apparatus: Apparatus, prompt_len: int, kept_s: list[float], recomputed_s: list[float], same: int
) -> Finding:
    prediction, out_len = apparatus.prediction, len(kept_s)
    numbers = list(range(1, out_len + 1))
    each_kept_s = [kept_s[0], *(late - early for early, late in pairwise(kept_s))]

    def kept(number: int) -> list[StepWork]:
        return _recompute(apparatus, prompt_len) if number == 1 else [StepWork(contexts=[prompt_len + number - 1])]

    def again(number: int) -> list[StepWork]:
        return _recompute(apparatus, prompt_len + number - 1)

    def summed(steps: Callable[[int], list[StepWork]]) -> Callable[[int], list[StepWork]]:
        return lambda number: [work for earlier in range(1, number + 1) for work in steps(earlier)]

    def points(tone: Tone, values: list[float], label: str, scale: float) -> Series:
        return Series(tone, Mark.MEASURED, tuple(map(float, numbers)), tuple(v * scale for v in values), label)

    written = Axis("tokens written")
    works = [*map(kept, numbers), *map(again, numbers)]
    seconds = [*each_kept_s, *recomputed_s]
    verdict = "the same tokens" if same == out_len else f"{same} of {out_len} tokens the same"
    return Finding(
        chart=chart(
            prediction,
            Panel(
                written,
                Axis("time for this token (ms)", log=True),
                (
                    points(Tone.PREFILL, recomputed_s, "without cache:\na prefill each", MILLISECONDS),
                    points(Tone.DECODE, each_kept_s, "with cache:\na decode each", MILLISECONDS),
                    *lines(prediction, Tone.PREFILL, numbers, again),
                    *lines(prediction, Tone.DECODE, numbers, kept),
                ),
            ),
            Panel(
                written,
                Axis("time since the request (s)"),
                (
                    points(Tone.PREFILL, list(accumulate(recomputed_s)), "without cache", 1.0),
                    points(Tone.DECODE, kept_s, "with cache", 1.0),
                    *lines(prediction, Tone.PREFILL, numbers, summed(again), lambda _, spent_s: spent_s),
                    *lines(prediction, Tone.DECODE, numbers, summed(kept), lambda _, spent_s: spent_s),
                ),
            ),
        ),
        sentence=(
            f"Behind {prompt_len} tokens, writing {out_len} takes {duration(kept_s[-1])} with the KV cache and "
            f"{duration(sum(recomputed_s))} without, {ratio(sum(recomputed_s) / kept_s[-1])} as long, for {verdict}; "
            f"the last token alone takes {ratio(recomputed_s[-1] / each_kept_s[-1])} as long, and the gap widens with "
            "the text." + judged(prediction, seconds, works)
        ),
        method=(
            "Greedy decoding of the same prompt, twice. Without the cache every token is a request of its own: the "
            "whole text so far as its prompt, no prefix kept, one token out. The first token is a prefill either way."
        ),
        numbers={
            "prompt_tokens": prompt_len,
            "with_cache_s": each_kept_s,
            "without_cache_s": recomputed_s,
            "same_tokens": same,
            "prediction_error": error_of(prediction, seconds, works),
        },
    )


EXPERIMENT = Experiment(
    "kv-cache",
    "With and without the KV cache",
    "What would decode cost if keys and values were not kept?",
    measure,
)
