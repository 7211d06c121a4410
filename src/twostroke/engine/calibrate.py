"""Measuring what steps cost: a spread of real steps through an engine (prompts short and long, few and many streams,
both at once), as much of it as the time allows, fitted; and what a request costs beside its steps. The spread is
played twice: the second round tells how far off the first round's fit is. Stores nothing."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from math import inf

from twostroke.core.errors import BackendError
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.speculation import NO_DRAFTS
from twostroke.core.step import Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.cost.calibration import Calibration
from twostroke.cost.floor import StepWork, work_of
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.newcomer import Newcomer, fit_newcomers
from twostroke.cost.step_cost import StepCost
from twostroke.engine.engine import Engine

TEMPERATURE = 0.7
"""As people use it: drawing a token costs a little more than taking the likeliest."""
PASSES = 8
"""How often the fit sees each measured step: it moves a little at a time."""
SHORTEST_RUN = 4
"""Of decode steps of one kind, for them to count."""
SHORT_PROMPTS = (8, 12, 16, 24, 32, 48, 64) * 2
"""Read alone: much of what users type is so short, and matrix products of few rows go by smaller tiles. Twice a round:
the lower third of two measurements would be the lesser one, and lean low."""
IDLE_S = 0.02
"""How long an engine rests before a prompt that comes alone: in service it has rested too, or others would be beside
it, and threads and caches that have slept cost the first step something."""


@dataclass(frozen=True, slots=True)
class Play:
    """Prompts that arrive together, and one that arrives while their answers are written."""

    prompts: tuple[int, ...]
    out_len: int
    late_prompt: int | None = None

    @property
    def is_alone(self) -> bool:
        return len(self.prompts) == 1 and self.late_prompt is None


@dataclass(frozen=True, slots=True)
class Observation:
    work: StepWork
    compute_s: float
    host_s: float | None
    """From the end of the step before to this one's start; None: there was none right before."""


@dataclass(frozen=True, slots=True)
class Round:
    """What a round of the spread showed."""

    steps: list[Observation] = field(default_factory=list)
    newcomers: list[Newcomer] = field(default_factory=list)


def spread(step_tokens: int, max_running: int, max_context: int) -> list[Play]:
    """From cheap to dear, so that a slow model has seen the cheap ones of every kind when its time is up. Answers are
    long enough that most of their steps follow others of their kind, as in service, and not a prompt."""
    many = min(max_running, step_tokens)
    longest = max_context - 64
    plays = [
        Play((16,), 40),
        *(Play((length,), 3) for length in SHORT_PROMPTS if length < step_tokens),
        Play((step_tokens // 12,), 6),
        Play((step_tokens // 6,), 6),
        Play((step_tokens // 4,), 40),
        Play((step_tokens * 2 // 5,), 6),
        Play((24,) * min(2, many), 24),
        Play((24,) * min(4, many), 24),
        Play((24,) * min(8, many), 24),
        Play((step_tokens - 12,), 40),
        Play((24,) * min(16, many), 24),
        Play((64,) * min(6, many - 1), 24, late_prompt=step_tokens + step_tokens // 4),
        Play((3 * step_tokens,), 24),
        Play((24,) * many, 12),
        Play((step_tokens // 2,) * min(8, many), 24),
        Play((step_tokens // 4,) * min(16, many - 1), 24, late_prompt=2 * step_tokens),
        Play((2 * step_tokens,) * min(2, many), 24),
    ]
    return [
        Play(
            tuple(max(1, min(length, longest)) for length in play.prompts),
            play.out_len,
            None if play.late_prompt is None else max(1, min(play.late_prompt, longest)),
        )
        for play in plays
        if play.prompts
    ]


class _Player:
    """Plays on an engine of its own prompts, and notes what each step took."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._num_requests = 0
        self._ended_s: float | None = None
        self.seen = Round()

    def play(self, play: Play) -> None:
        if play.is_alone:
            time.sleep(IDLE_S)
        for length in play.prompts:
            self._add(length, play.out_len)
        num_tokens, late = 0, play.late_prompt
        self._ended_s = None
        while self._engine.busy:
            for event in self._engine.step():
                if isinstance(event, TokenEvent):
                    num_tokens += len(event.token_ids)
                    if event.error is not None:
                        raise BackendError(event.error)
                    if play.is_alone and event.timing is not None:
                        self._note_newcomer(event.timing)
            if late is not None and num_tokens > 3 * len(play.prompts):
                self._add(late, 3)
                late = None

    def _add(self, prompt_len: int, out_len: int) -> None:
        self._num_requests += 1
        token_ids = tuple(self._random.randrange(self._vocab_size) for _ in range(prompt_len))
        sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=out_len, ignore_eos=True, speculation=NO_DRAFTS)
        self._engine.add(Request(f"calibration-{self._num_requests}", token_ids, sampling))

    def note(self, step: Step, result: StepResult) -> None:
        now_s, before_s = time.perf_counter(), self._ended_s
        self._ended_s = now_s
        host_s = None if before_s is None else max(0.0, now_s - before_s - result.compute_s)
        self.seen.steps.append(Observation(work_of(step, result.drafted), result.compute_s, host_s))

    def _note_newcomer(self, timing: SequenceTiming) -> None:
        if timing.ttft_s is not None and not timing.preemptions:
            self.seen.newcomers.append(
                Newcomer(timing.prompt_tokens, timing.ttft_s, timing.prefill_compute_s, timing.prefill_chunks)
            )


def observe_spread(
    engine: Engine, vocab_size: int, limit_s: float, progress: Callable[[int, int], None] | None = None
) -> Iterator[Round]:
    """Rounds of the spread, each as far as the time goes: the first always gives something, the second may be missing.
    `progress` is told how many plays are done, of how many."""
    config, pool_tokens = engine.scheduler.config, engine.scheduler.ledger.max_total_tokens
    max_context = config.max_context if pool_tokens is None else min(config.max_context, pool_tokens)
    plays = spread(config.max_tokens_per_step, config.running_limit, max_context)
    player, before = _Player(engine, vocab_size), engine.on_step
    player.play(plays[0])  # what only the very first steps pay for is not theirs to tell
    player.seen = Round()
    engine.on_step = player.note
    started_s, done = time.perf_counter(), 0
    try:
        for last_round in (False, True):
            for play in plays:
                if player.seen.steps and time.perf_counter() - started_s > limit_s:
                    break
                player.play(play)
                done += 1
                if progress is not None:
                    progress(done, 2 * len(plays))
            seen, player.seen = player.seen, Round()
            if seen.steps:
                yield seen
            if last_round or time.perf_counter() - started_s > limit_s:
                return
    finally:
        engine.on_step = before


def fit(shape: ModelShape, ceilings: Ceilings, rounds: list[Round]) -> Calibration:
    """What one or two rounds tell."""
    cost = StepCost(shape, ceilings)
    _teach(cost, rounds[0].steps)
    unseen = rounds[-1].steps
    misses = [abs(cost.seconds(seen.work) / seen.compute_s - 1.0) for seen in unseen if seen.compute_s > 0.0]
    everything = [seen for round_ in rounds for seen in round_.steps]
    if len(rounds) > 1:
        cost = StepCost(shape, ceilings)
        _teach(cost, everything)
    between_s = [seen.host_s for seen in everything if seen.host_s is not None]
    host_s = statistics.median(between_s) if between_s else 0.0
    newcomer_s, newcomer_s_per_token = fit_newcomers([seen for round_ in rounds for seen in round_.newcomers], host_s)
    return Calibration(
        ceilings=ceilings,
        coefficients=cost.coefficients,
        host_s=host_s,
        error=statistics.fmean(misses) if misses else inf,
        num_steps=len(everything),
        taken=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        newcomer_s=newcomer_s,
        newcomer_s_per_token=newcomer_s_per_token,
    )


def _teach(cost: StepCost, observations: list[Observation]) -> None:
    """In an order that mixes the kinds, several times over."""
    order, seen = random.Random(0), typical(observations)
    for _ in range(PASSES):
        for work, seconds in order.sample(seen, len(seen)):
            cost.observe(work, seconds)


def typical(observations: list[Observation]) -> list[tuple[StepWork, float]]:
    """Each work once, at the lower third of what it took: whatever else the machine does can only slow a step down. A
    run of decode steps differs by a token of context, and counts as one work. Short runs are left out: they are what is
    left of a crowd, and slow for what came before them."""
    chunks: dict[tuple[object, ...], list[Observation]] = {}
    found: list[list[Observation]] = []
    for (has_chunks, _), steps in groupby(observations, lambda seen: (bool(seen.work.chunks), len(seen.work.contexts))):
        alike = list(steps)
        if not has_chunks and len(alike) >= SHORTEST_RUN:
            found.append(alike)
        for seen in alike if has_chunks else ():
            chunks.setdefault((seen.work.chunks, tuple(seen.work.contexts)), []).append(seen)
    return [
        (alike[len(alike) // 2].work, sorted(seen.compute_s for seen in alike)[(len(alike) - 1) // 3])
        for alike in [*found, *chunks.values()]
    ]
