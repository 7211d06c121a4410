"""With and without prefix caching: a prompt whose beginning was read before."""

from __future__ import annotations

from twostroke.lab.apparatus import Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Panel, Tone
from twostroke.lab.experiments.experiment import Compared, Experiment, Say, between, chart, lines, measured
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import prefill_steps
from twostroke.lab.wording import count, duration, ratio

QUICK_PREFIXES, PREFIXES = (64, 256, 512, 1024, 2048), (64, 256, 512, 1024, 2048, 4096, 8192)
NEW_TOKENS = 32


def measure(apparatus: Apparatus, say: Say) -> Finding:
    cold: dict[int, Measured] = {}
    warm: dict[int, Measured] = {}
    cached: dict[int, int] = {}
    for shared in QUICK_PREFIXES if apparatus.effort.is_quick else PREFIXES:
        if not apparatus.fitting([shared + NEW_TOKENS], room=1):
            continue
        say(f"{count(shared)} tokens shared")
        head = apparatus.prompt(shared)
        cold[shared], _ = _read(apparatus, head, forget=True)
        warm[shared], cached[shared] = _read(apparatus, head, forget=False)
    if len(cold) < 2:
        raise CannotMeasureError("two prefix lengths are needed, and there is no time or no room for them")
    if not any(cached.values()):
        raise CannotMeasureError("nothing was found in the prefix cache: is it off?")
    return _finding(apparatus, cold, warm, cached)


def _read(apparatus: Apparatus, head: list[int], *, forget: bool) -> tuple[Measured, int]:
    """TTFT, and the tokens that were found in the cache at least."""
    found: list[int] = []

    def once() -> float:
        if forget:
            apparatus.forget()
        played = apparatus.play([head + apparatus.prompt(NEW_TOKENS)], 1)
        found.append(played.works[0].chunks[0][0])
        return played.streams[0].ttft_s

    return apparatus.repeat(once), min(found)


def _finding(
    apparatus: Apparatus, cold: dict[int, Measured], warm: dict[int, Measured], cached: dict[int, int]
) -> Finding:
    prediction, lengths, chunk_tokens = apparatus.prediction, list(cold), apparatus.chunk_tokens
    cold_works = [prefill_steps(shared + NEW_TOKENS, chunk_tokens) for shared in lengths]
    warm_works = [prefill_steps(shared + NEW_TOKENS, chunk_tokens, cached[shared]) for shared in lengths]
    cold_s, warm_s = [value.median for value in cold.values()], [value.median for value in warm.values()]
    longest, grid = lengths[-1], between(lengths[0], lengths[-1])
    found = cached[longest] / longest  # a window may give back what no query can read, so that less is found
    compared = Compared(prediction, cold_s + warm_s, cold_works + warm_works)
    return Finding(
        chart=chart(
            prediction,
            Panel(
                Axis("prefix shared with an earlier prompt (tokens)", log=True, ticks=tuple(map(float, lengths))),
                Axis("time to first token (ms)", log=True),
                (
                    measured(Tone.PREFILL, lengths, cold.values(), "read in full"),
                    measured(Tone.PREFILL, lengths, warm.values(), "prefix found\nin the cache", hollow=True),
                    *lines(prediction, Tone.PREFILL, grid, lambda n: prefill_steps(n + NEW_TOKENS, chunk_tokens)),
                    *lines(
                        prediction,
                        Tone.PREFILL,
                        grid,
                        lambda n: prefill_steps(n + NEW_TOKENS, chunk_tokens, int(found * n)),
                        hollow=True,
                    ),
                ),
            ),
        ),
        sentence=(
            f"{NEW_TOKENS} new tokens behind {count(longest)} known ones take {duration(cold_s[-1])} to read in full "
            f"and {duration(warm_s[-1])} when the prefix cache has the rest ({count(cached[longest])} tokens found), "
            f"{ratio(cold_s[-1] / warm_s[-1])} as fast: a hit costs its new tokens, whose attention still reads the "
            "whole prefix, and saves TTFT alone; decode is what it was." + compared.clause
        ),
        method=(
            f"Prompts with a common beginning and {NEW_TOKENS} tokens of their own, one at a time, one token out. Read "
            "in full: cached prefixes are forgotten before each. Points are medians of up to "
            f"{apparatus.effort.repetitions}, bars the middle 80%."
        ),
        numbers={
            "shared_tokens": lengths,
            "cached_tokens": cached,
            "cold_s": {length: value.values for length, value in cold.items()},
            "hit_s": {length: value.values for length, value in warm.items()},
            "prediction_error": compared.error,
        },
    )


EXPERIMENT = Experiment(
    "prefix-cache",
    "With and without prefix caching",
    "What does it save when a prompt begins like an earlier one?",
    measure,
)
