"""A load of prompts alone, up to more than the machine can read: TTFT grows without bound while KV stays nearly empty.
So TTFT includes queueing, and KV occupancy alone is a wrong signal to scale by."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from twostroke.lab.apparatus import Apparatus, Measured
from twostroke.lab.chart import Axis, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import CannotMeasureError, Experiment, Say, chart, measured
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import mean_error, prefill_steps
from twostroke.lab.stage import Stage
from twostroke.lab.wording import count, duration, ratio, share

LOADS = (0.3, 0.6, 0.9, 1.2, 1.5)
"""Prompt tokens that arrive, as a share of what one prompt after another would let through."""
PROMPT_TOKENS = (256, 64, 16)
QUICK_REQUESTS, REQUESTS = 20, 60
SEED = 11


@dataclass(frozen=True, slots=True)
class _Seen:
    ttft: Measured
    predicted: tuple[float, ...]
    occupancy: float
    """The most of the KV blocks that were in use at a time."""


def measure(apparatus: Apparatus, say: Say) -> Finding:
    num_requests = QUICK_REQUESTS if apparatus.effort.is_quick else REQUESTS
    for prompt_len in PROMPT_TOKENS:
        works = prefill_steps(prompt_len, apparatus.chunk_tokens) * num_requests
        if prompt_len < apparatus.max_tokens and apparatus.can_afford(works):
            break
    else:
        raise CannotMeasureError("so many prompts would take too long here")
    say("one prompt after another")
    alone_s = apparatus.ttft(prompt_len).median
    found = {}
    for load in LOADS:
        say(f"load {load:.0%}")
        found[load] = _play_once(apparatus, prompt_len, num_requests, alone_s / load)
    return _finding(apparatus, prompt_len, num_requests, alone_s, found)


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
    service_s = apparatus.prediction.steps_s(prefill_steps(prompt_len, apparatus.chunk_tokens))
    return _Seen(
        Measured(tuple(stream.ttft_s for stream in streams)),
        tuple(first_in_first_out(arrivals, service_s)),
        max(occupancies),
    )


def first_in_first_out(arrivals_s: list[float], service_s: float) -> list[float]:
    """What each waits until it is served, its own service included, where one is served at a time."""
    waits, free_s = [], 0.0
    for arrival_s in arrivals_s:
        free_s = max(free_s, arrival_s) + service_s
        waits.append(free_s - arrival_s)
    return waits


def _occupancy(apparatus: Apparatus) -> float:
    """Blocks that running sequences hold, of all."""
    groups = apparatus.engine.scheduler.counts().blocks
    return sum(group.used for group in groups) / sum(group.used + group.free + group.cached for group in groups)


def _finding(
    apparatus: Apparatus, prompt_len: int, num_requests: int, alone_s: float, found: dict[float, _Seen]
) -> Finding:
    prediction = apparatus.prediction
    loads = [100 * load for load in found]
    axis = Axis("prompts that arrive (% of what can be read)")
    medians = [seen.ttft.median for seen in found.values()]
    guesses = [statistics.median(seen.predicted) for seen in found.values()]
    fullest = max(seen.occupancy for seen in found.values())
    full = tuple(100 * seen.occupancy for seen in found.values())
    mark = Mark.PREDICTED if prediction.is_calibrated else Mark.FLOOR
    judged = (
        f" First in, first out at the calibrated cost was off by {share(mean_error(medians, guesses))} on average."
        if prediction.is_calibrated
        else ""
    )
    return Finding(
        chart=chart(
            prediction,
            Panel(
                axis,
                Axis("time to first token (ms)", log=True),
                (
                    measured(Tone.PREFILL, loads, (seen.ttft for seen in found.values()), "TTFT, queue\nincluded"),
                    Series(Tone.PREFILL, mark, tuple(loads), tuple(guess * 1e3 for guess in guesses)),
                    Series(Tone.PLAIN, Mark.LIMIT, (loads[0], loads[-1]), (alone_s * 1e3,) * 2, "alone"),
                ),
            ),
            Panel(
                axis,
                Axis("KV blocks in use, at most (%)"),
                (
                    Series(Tone.MEMORY, Mark.MEASURED, tuple(loads), full, "KV"),
                    Series(Tone.PLAIN, Mark.LIMIT, (loads[0], loads[-1]), (100.0, 100.0), "full"),
                ),
            ),
        ),
        sentence=(
            f"At {loads[0]:.0f}% of what this machine can read a prompt waits {duration(medians[0])} for its first "
            f"token, at {loads[-1]:.0f}% {duration(medians[-1])}, {ratio(medians[-1] / alone_s)} what it takes alone, "
            f"and more the longer the load lasts: that is queueing. Meanwhile KV is never more than {share(fullest)} "
            "in use, so a scaler that watches KV occupancy would see an idle machine." + judged
        ),
        method=(
            f"{num_requests} prompts of {count(prompt_len)} tokens at random times (Poisson, the same draw at each "
            f"load), one token out, nothing cached. 100% is one prompt after another, {duration(alone_s)} each. Points "
            "are medians, bars the least and the most; the line serves the same arrivals first in, first out."
        ),
        numbers={
            "prompt_tokens": prompt_len,
            "alone_s": alone_s,
            "load": list(found),
            "ttft_s": {load: seen.ttft.values for load, seen in found.items()},
            "kv_occupancy": {load: seen.occupancy for load, seen in found.items()},
            "prediction_error": mean_error(medians, guesses) if prediction.is_calibrated else None,
        },
    )


EXPERIMENT = Experiment(
    "saturation",
    "A load of prompts alone, up to too much",
    "What does overload look like when it is prefill that is short, and does KV occupancy show it?",
    measure,
)
