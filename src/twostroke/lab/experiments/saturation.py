"""A load of prompts alone, up to more than the machine can read: TTFT grows with the queue, and KV does not fill. So
TTFT includes queueing, and KV occupancy alone is a wrong signal to scale by."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus, CannotMeasureError, Measured
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import MILLISECONDS, Experiment, Say, chart, measured, off_by
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import Prediction, mean_error, prefill_steps
from twostroke.lab.stage import Stage
from twostroke.lab.wording import count, duration, ratio, share

LOADS = (0.3, 0.6, 0.9, 1.2, 1.5)
"""Prompts that arrive, as a share of what the machine reads when all of them are there at once."""
PROMPT_TOKENS = (256, 64, 16)
QUICK_REQUESTS, REQUESTS = 24, 80
SEED = 11
LITTLE_KV = 0.5
"""Whoever scales by KV occupancy does nothing below this."""


@dataclass(frozen=True, slots=True)
class _Seen:
    ttft: Measured
    predicted: tuple[float, ...]
    occupancy: float
    """The most of the KV blocks that were in use after a step, the next one in flight."""


def measure(apparatus: Apparatus, say: Say) -> Finding:
    num_requests = QUICK_REQUESTS if apparatus.effort.is_quick else REQUESTS
    for prompt_len in PROMPT_TOKENS:
        works = prefill_steps(prompt_len, apparatus.chunk_tokens) * num_requests
        if prompt_len < apparatus.max_tokens and apparatus.can_afford(works):
            break
    else:
        raise CannotMeasureError("these prompts would take too long here")
    say("one prompt alone")
    alone_s = apparatus.ttft(prompt_len).median
    say("all prompts at once")
    apparatus.forget()
    burst = apparatus.play([apparatus.prompt(prompt_len) for _ in range(num_requests)], 1)
    each_s = sum(burst.seconds) / num_requests
    found = {}
    for load in LOADS:
        say(f"load {load:.0%}")
        found[load] = _play_once(apparatus, prompt_len, num_requests, each_s / load)
    return _finding(apparatus, prompt_len, num_requests, alone_s, each_s, found)


def _play_once(apparatus: Apparatus, prompt_len: int, num_requests: int, mean_gap_s: float) -> _Seen:
    draw, due_s, arrivals = random.Random(SEED), 0.0, []
    for _ in range(num_requests):
        arrivals.append(due_s)
        due_s += draw.expovariate(1 / mean_gap_s)
    prompts = [apparatus.prompt(prompt_len) for _ in arrivals]
    apparatus.forget()
    occupancies = [0.0]

    def begin(stage: Stage) -> None:
        stage.start()
        left = list(zip(arrivals, prompts, strict=True))[::-1]
        while left or stage.busy():
            now_s = stage.clock() - stage.started_s
            while left and left[-1][0] <= now_s:
                at_s, prompt = left.pop()
                stage.add(prompt, 1, born_s=stage.started_s + at_s)
            if stage.busy():
                stage.step()
                occupancies.append(_occupancy(apparatus))
            else:
                time.sleep(max(0.0, left[-1][0] - now_s))

    streams = apparatus.perform(begin).streams
    return _Seen(
        Measured(tuple(stream.ttft_s for stream in streams)),
        tuple(first_come_first_read(apparatus.prediction, arrivals, prompt_len)),
        max(occupancies),
    )


def first_come_first_read(prediction: Prediction, arrivals_s: Sequence[float], prompt_len: int) -> list[float]:
    """The TTFT of each prompt where steps follow each other, each with as much of the oldest prompts as it takes."""
    left, first, now_s = [prompt_len] * len(arrivals_s), 0, -math.inf
    ttfts: list[float] = []
    while first < len(left):
        if now_s < arrivals_s[first]:  # the engine is idle
            now_s = arrivals_s[first] + prediction.newcomer_s(prompt_len)
        chunks, room, at = [], prediction.chunk_tokens, first
        while at < len(left) and arrivals_s[at] <= now_s and room:
            num_tokens = min(left[at], room)
            chunks.append((prompt_len - left[at], num_tokens))
            left[at] -= num_tokens
            room -= num_tokens
            at += 1
        finished = sum(1 for tokens in left[first:at] if not tokens)
        now_s += prediction.step_s(StepWork(tuple(chunks), finished))
        ttfts.extend(now_s - arrival_s for arrival_s in arrivals_s[first : first + finished])
        first += finished
    return ttfts


def _occupancy(apparatus: Apparatus) -> float:
    """Blocks that running sequences hold, of all."""
    groups = apparatus.engine.scheduler.counts().blocks
    return sum(group.used for group in groups) / sum(group.used + group.free + group.cached for group in groups)


def _chart(prediction: Prediction, alone_s: float, found: dict[float, _Seen]) -> Chart:
    loads = [100 * load for load in found]
    ends, alone_ms = (loads[0], loads[-1]), alone_s * MILLISECONDS
    axis = Axis("prompts that arrive (% of what can be read)")
    guesses = tuple(statistics.median(seen.predicted) * MILLISECONDS for seen in found.values())
    occupancy = tuple(100 * seen.occupancy for seen in found.values())
    return chart(
        prediction,
        Panel(
            axis,
            Axis("time to first token (ms)", log=True),
            (
                measured(Tone.PREFILL, loads, (seen.ttft for seen in found.values()), "TTFT, queue\nincluded"),
                Series(Tone.PREFILL, Mark.PREDICTED if prediction.is_calibrated else Mark.FLOOR, tuple(loads), guesses),
                Series(Tone.PLAIN, Mark.LIMIT, ends, (alone_ms, alone_ms), "alone"),
            ),
        ),
        Panel(
            axis,
            Axis("KV blocks in use, at most (%)"),
            (
                Series(Tone.MEMORY, Mark.MEASURED, tuple(loads), occupancy, "KV"),
                Series(Tone.PLAIN, Mark.LIMIT, ends, (100.0, 100.0), "full"),
            ),
        ),
    )


def _finding(
    apparatus: Apparatus,
    prompt_len: int,
    num_requests: int,
    alone_s: float,
    each_s: float,
    found: dict[float, _Seen],
) -> Finding:
    prediction, seen = apparatus.prediction, list(found.values())
    medians, guesses = [one.ttft.median for one in seen], [statistics.median(one.predicted) for one in seen]
    fullest, error = max(one.occupancy for one in seen), mean_error(medians, guesses)
    lesson = ", so whoever scales by KV occupancy sees an idle machine" if fullest < LITTLE_KV else ""
    judged = off_by(error) if prediction.is_calibrated else ""
    return Finding(
        chart=_chart(prediction, alone_s, found),
        sentence=(
            f"At {LOADS[0]:.0%} of what this machine can read, a prompt waits {duration(medians[0])} for its first "
            f"token; at {LOADS[-1]:.0%} {duration(medians[-1])}, {ratio(medians[-1] / alone_s)} what it takes alone, "
            f"and above 100% more the longer the load lasts: that is the queue. Meanwhile at most {share(fullest)} of "
            f"KV is in use{lesson}." + judged
        ),
        method=(
            f"{num_requests} prompts of {count(prompt_len)} tokens at random times (Poisson, the same draw at each "
            f"load), one token out, nothing cached. 100% is all of them at once, {duration(each_s)} each. Points are "
            "medians, bars the middle 80%; the line reads the same arrivals in their order. The KV set aside "
            f"here has room for {count(apparatus.pool_tokens)} tokens; prompts that wait hold none of it."
        ),
        numbers={
            "prompt_tokens": prompt_len,
            "alone_s": alone_s,
            "each_s": each_s,
            "load": list(found),
            "ttft_s": {load: one.ttft.values for load, one in found.items()},
            "kv_occupancy": {load: one.occupancy for load, one in found.items()},
            "prediction_error": error if prediction.is_calibrated else None,
        },
    )


EXPERIMENT = Experiment(
    "saturation",
    "A load of prompts alone, up to too much",
    "What does overload look like when prefill is what is short, and does KV occupancy show it?",
    measure,
)
