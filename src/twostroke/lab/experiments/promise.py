"""The same load of short and long prompts under two policies, up to more than the machine can read: how many first
tokens come as promised, in order of arrival and in order of what is due."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.lab.apparatus import Apparatus, CannotMeasureError
from twostroke.lab.chart import Axis, Chart, Mark, Panel, Series, Tone
from twostroke.lab.experiments.experiment import Experiment, Say, chart
from twostroke.lab.finding import Finding
from twostroke.lab.prediction import Prediction, prefill_steps
from twostroke.lab.stage import Stage
from twostroke.lab.wording import count, duration, share

POLICIES = ("fifo", "slack")
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Prompts that arrive, as a share of what the machine reads when all of them are there at once."""
LENGTHS = ((64, 640), (32, 256), (16, 96))
"""Of a chat's prompt and of a document's."""
DOCUMENTS = 0.2
"""The share of requests that are documents."""
QUICK_REQUESTS, REQUESTS = 30, 120
CHAT_TIMES, DOCUMENT_TIMES = 6.0, 6.0
"""What is promised, as a multiple of what such a prompt takes alone. A chat also has the time of one document, so that
one which is being read when it comes breaks no promise."""
SEED = 23
CHAT, DOCUMENT = "chat", "document"


@dataclass(frozen=True, slots=True)
class Ask:
    at_s: float
    prompt_len: int
    level: str
    promised_s: float


@dataclass(frozen=True, slots=True)
class Seen:
    """Of one policy under one load: which requests kept their promise, and which were predicted to."""

    kept: tuple[bool, ...]
    predicted: tuple[bool, ...]

    @property
    def share(self) -> float:
        return sum(self.kept) / len(self.kept)

    @property
    def predicted_share(self) -> float:
        return sum(self.predicted) / len(self.predicted)


def measure(apparatus: Apparatus, say: Say) -> Finding:
    num_requests = QUICK_REQUESTS if apparatus.effort.is_quick else REQUESTS
    chat_len, document_len = _lengths(apparatus, num_requests)
    say("a prompt of each kind alone")
    chat_s, document_s = (apparatus.ttft(length).median for length in (chat_len, document_len))
    promised = {CHAT: CHAT_TIMES * chat_s + document_s, DOCUMENT: DOCUMENT_TIMES * document_s}
    lengths = {CHAT: chat_len, DOCUMENT: document_len}
    kinds = _kinds(num_requests)
    say("all prompts at once")
    apparatus.forget()
    burst = apparatus.play([apparatus.prompt(lengths[kind]) for kind in kinds], 1)
    each_s = sum(burst.seconds) / num_requests
    levels = ServiceLevels((ServiceLevel("default"), *(ServiceLevel(name, ttft_s=promised[name]) for name in lengths)))
    found: dict[str, dict[float, Seen]] = {policy: {} for policy in POLICIES}
    before = apparatus.engine.scheduler.use_policy(POLICIES[0], levels)
    try:
        for load in LOADS:
            asks = _asks(kinds, lengths, promised, each_s / load)
            for policy in POLICIES:
                say(f"{policy} at load {load:.0%}")
                apparatus.engine.scheduler.use_policy(policy, levels)
                found[policy][load] = _play_once(apparatus, asks, policy)
    finally:
        apparatus.serve_as("")
        apparatus.engine.scheduler.use_policy(*before)
    return _finding(apparatus, lengths, promised, num_requests, each_s, found)


def _lengths(apparatus: Apparatus, num_requests: int) -> tuple[int, int]:
    for chat_len, document_len in LENGTHS:
        works = [
            *prefill_steps(chat_len, apparatus.chunk_tokens) * round(num_requests * (1 - DOCUMENTS)),
            *prefill_steps(document_len, apparatus.chunk_tokens) * round(num_requests * DOCUMENTS),
        ]
        if document_len < apparatus.max_tokens and apparatus.can_afford(works):
            return chat_len, document_len
    raise CannotMeasureError("these prompts would take too long here")


def _kinds(num_requests: int) -> list[str]:
    kinds = [DOCUMENT] * round(num_requests * DOCUMENTS)
    kinds += [CHAT] * (num_requests - len(kinds))
    random.Random(SEED).shuffle(kinds)
    return kinds


def _asks(kinds: Sequence[str], lengths: dict[str, int], promised: dict[str, float], mean_gap_s: float) -> list[Ask]:
    draw, due_s, asks = random.Random(SEED), 0.0, []
    for kind in kinds:
        asks.append(Ask(due_s, lengths[kind], kind, promised[kind]))
        due_s += draw.expovariate(1 / mean_gap_s)
    return asks


def _play_once(apparatus: Apparatus, asks: Sequence[Ask], policy: str) -> Seen:
    prompts = [apparatus.prompt(ask.prompt_len) for ask in asks]
    apparatus.forget()
    streams = apparatus.perform(partial(_arrive, apparatus, asks, prompts)).streams
    predicted = first_tokens(apparatus.prediction, asks, by_due=policy == "slack")
    return Seen(
        tuple(stream.ttft_s <= ask.promised_s for stream, ask in zip(streams, asks, strict=True)),
        tuple(ttft_s <= ask.promised_s for ttft_s, ask in zip(predicted, asks, strict=True)),
    )


def _arrive(apparatus: Apparatus, asks: Sequence[Ask], prompts: Sequence[Sequence[int]], stage: Stage) -> None:
    stage.start()
    left = list(zip(asks, prompts, strict=True))[::-1]
    while left or stage.busy():
        now_s = stage.clock() - stage.started_s
        while left and left[-1][0].at_s <= now_s:
            ask, prompt = left.pop()
            apparatus.serve_as(ask.level)
            stage.add(prompt, 1, born_s=stage.started_s + ask.at_s)
        if stage.busy():
            stage.step()
        else:
            time.sleep(max(0.0, left[-1][0].at_s - now_s))


def first_tokens(prediction: Prediction, asks: Sequence[Ask], *, by_due: bool) -> list[float]:
    """The TTFT of each where steps follow each other, each with as much of the first prompts as it takes. The first is
    the oldest, or, `by_due`, whose first token is due first, of those that can still be in time before the others."""
    left, ttfts, now_s = [ask.prompt_len for ask in asks], [math.inf] * len(asks), -math.inf
    while any(left):
        ready = [index for index, tokens in enumerate(left) if tokens and asks[index].at_s <= now_s]
        if not ready:  # the engine is idle
            index = next(index for index, tokens in enumerate(left) if tokens)
            now_s = asks[index].at_s + prediction.newcomer_s(asks[index].prompt_len)
            continue
        if by_due:
            ready.sort(key=partial(_due, prediction, asks, left, now_s))
        chunks, room, read = [], prediction.chunk_tokens, []
        for index in ready:
            num_tokens = min(left[index], room)
            if not num_tokens:
                break
            chunks.append((asks[index].prompt_len - left[index], num_tokens))
            left[index] -= num_tokens
            room -= num_tokens
            read += [index] if not left[index] else []
        now_s += prediction.step_s(StepWork(tuple(chunks), len(read)))
        for index in read:
            ttfts[index] = now_s - asks[index].at_s
    return ttfts


def _due(
    prediction: Prediction, asks: Sequence[Ask], left: Sequence[int], now_s: float, index: int
) -> tuple[bool, float]:
    ask = asks[index]
    due_s = ask.at_s + ask.promised_s
    reading_s = prediction.step_s(StepWork(((ask.prompt_len - left[index], left[index]),), 1))
    return now_s + reading_s > due_s, due_s


def _chart(prediction: Prediction, found: dict[str, dict[float, Seen]]) -> Chart:
    loads = tuple(100 * load for load in LOADS)
    series = []
    for policy, seen in found.items():
        tone, hollow = (Tone.PREFILL, False) if policy == "slack" else (Tone.PLAIN, True)
        kept = tuple(100 * one.share for one in seen.values())
        predicted = tuple(100 * one.predicted_share for one in seen.values())
        line = Mark.PREDICTED if prediction.is_calibrated else Mark.FLOOR
        series += [
            Series(tone, Mark.MEASURED, loads, kept, policy, hollow=hollow),
            Series(tone, line, loads, predicted, hollow=hollow),
        ]
    axis = Axis("prompts that arrive (% of what can be read)")
    return chart(prediction, Panel(axis, Axis("promises kept (%)"), tuple(series)))


def _finding(
    apparatus: Apparatus,
    lengths: dict[str, int],
    promised: dict[str, float],
    num_requests: int,
    each_s: float,
    found: dict[str, dict[float, Seen]],
) -> Finding:
    prediction, fifo, slack = apparatus.prediction, found["fifo"], found["slack"]
    error = sum(abs(one.share - one.predicted_share) for seen in found.values() for one in seen.values()) / (
        len(POLICIES) * len(LOADS)
    )
    judged = (
        f" The calibrated cost model was off by {100 * error:.0f} points on average."
        if prediction.is_calibrated
        else ""
    )
    apart = max(LOADS, key=lambda load: abs(slack[load].share - fifo[load].share))
    return Finding(
        chart=_chart(prediction, found),
        sentence=(
            f"At {apart:.0%} of what this machine can read, {share(slack[apart].share)} of the promises are kept where "
            f"whatever is due first goes first, and {share(fifo[apart].share)} in order of arrival: there they lie "
            f"furthest apart. At {LOADS[0]:.0%} it is {share(slack[LOADS[0]].share)} and "
            f"{share(fifo[LOADS[0]].share)}, at {LOADS[-1]:.0%} {share(slack[LOADS[-1]].share)} and "
            f"{share(fifo[LOADS[-1]].share)}." + judged
        ),
        method=(
            f"{num_requests} prompts at random times (Poisson, the same draw for both policies), four of five of "
            f"{count(lengths[CHAT])} tokens with a first token promised in {duration(promised[CHAT])}, the others of "
            f"{count(lengths[DOCUMENT])} in {duration(promised[DOCUMENT])}; one token out, nothing cached. 100% is all "
            f"of them at once, {duration(each_s)} each. The policies take turns on one engine. The lines read the same "
            "arrivals step by step, and leave out the share that slack keeps for those that are lost."
        ),
        numbers={
            "prompt_tokens": lengths,
            "promised_s": promised,
            "each_s": each_s,
            "load": list(LOADS),
            "kept": {policy: {load: one.share for load, one in seen.items()} for policy, seen in found.items()},
            "predicted": {
                policy: {load: one.predicted_share for load, one in seen.items()} for policy, seen in found.items()
            },
            "prediction_error": error if prediction.is_calibrated else None,
        },
    )


EXPERIMENT = Experiment(
    "promise",
    "Promises kept against load",
    "How many first tokens come as promised when more arrives than can be read, and does the order matter?",
    measure,
)
