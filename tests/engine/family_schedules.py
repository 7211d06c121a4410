"""Random schedules for a model, and what comes of them on a backend: who arrives when, with how much room, and who is
aborted."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from tests.models.tiny_checkpoints import VOCAB_SIZE

from twostroke.backends.interface import Backend
from twostroke.core.events import TokenEvent
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.spec import ModelSpec
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

MAX_CONTEXT = 64
MAX_TOKENS = 9
MOST_STEPS = 2000


def prompts() -> list[tuple[int, ...]]:
    """Some begin alike, over several blocks; some are longer than any window."""
    draw = random.Random(11)
    common = [draw.randrange(6, VOCAB_SIZE) for _ in range(30)]
    tails = [[draw.randrange(6, VOCAB_SIZE) for _ in range(count)] for count in (1, 7, 20, 3, 25, 12)]
    starts = (common, common, common, common[:17], [], [])
    return [(*start, *tail) for start, tail in zip(starts, tails, strict=True)]


PROMPTS = prompts()


@dataclass(frozen=True)
class Schedule:
    """Who comes when, with how much room."""

    block_size: int
    num_blocks: int  # of each KV group
    step_tokens: int
    max_running: int
    arrivals: tuple[tuple[int, int], ...]  # a step, and which prompt comes at it
    aborts: tuple[tuple[int, int], ...]  # a step, and which arrival is aborted at it

    @staticmethod
    def drawn(seed: int, block_sizes: tuple[int, ...], most_more: int) -> Schedule:
        """`most_more`: blocks beyond those of the longest request, at most, where there is little room."""
        draw = random.Random(seed)
        block_size = draw.choice(block_sizes)
        # Room for the longest alone and little more, or for all: some schedules preempt, some find prefixes.
        tight = -(-MAX_CONTEXT // block_size) + draw.randint(1, most_more)
        arrivals = sorted((draw.randrange(12), draw.randrange(len(PROMPTS))) for _ in range(draw.randrange(3, 7)))
        aborts = [(draw.randrange(2, 24), index) for index in range(len(arrivals)) if draw.random() < 0.2]
        return Schedule(
            block_size,
            draw.choice((tight, 8 * tight)),
            draw.choice((7, 16, 40, 64)),
            draw.choice((2, 4, 8)),
            tuple(arrivals),
            tuple(sorted(aborts)),
        )


@dataclass
class Tally:
    """What the schedules brought about: properties that nothing met would prove nothing."""

    schedules: int = 0
    cached: int = 0
    preempted: int = 0
    aborted: int = 0


class Maker(Protocol):
    """Makes a backend for a schedule."""

    block_sizes: tuple[int, ...]
    most_more: int

    def backend(self, checkpoint: Checkpoint, layout: KVLayout, schedule: Schedule) -> Backend: ...


def made(checkpoint: Checkpoint, schedule: Schedule, maker: Maker) -> tuple[Engine, Backend]:
    groups = tuple(
        KVGroup(group.layers, group.window, schedule.num_blocks, group.content, group.values)
        for group in checkpoint.spec.kv_groups()
    )
    layout = KVLayout(schedule.block_size, groups)
    own = maker.backend(checkpoint, layout, schedule)
    config = SchedulerConfig(
        max_context=MAX_CONTEXT,
        max_tokens_per_step=schedule.step_tokens,
        max_running=schedule.max_running,
        snapshot_tokens=1,
    )
    return Engine(Scheduler(config, layout), own, checkpoint.spec.vocab_size), own


def played(checkpoint: Checkpoint, schedule: Schedule, maker: Maker, tally: Tally) -> dict[int, list[int]]:
    """By arrival, the tokens of those that came to their end."""
    engine, own = made(checkpoint, schedule, maker)
    tokens: dict[int, list[int]] = {index: [] for index in range(len(schedule.arrivals))}
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    aborted = {index for _, index in schedule.aborts}
    try:
        for step in range(MOST_STEPS):
            for index, (when, prompt) in enumerate(schedule.arrivals):
                if when == step:
                    engine.add(Request(str(index), PROMPTS[prompt], sampling))
            for when, index in schedule.aborts:
                if when == step:
                    engine.abort(str(index))
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    tokens[int(event.request_id)] += event.token_ids
                    if event.timing is not None:
                        tally.cached += event.timing.cached_tokens > 0
                        tally.preempted += event.timing.preemptions > 0
            if step > schedule.arrivals[-1][0] and not engine.busy:
                break
        engine.scheduler.check()
    finally:
        own.close()
    tally.aborted += len(aborted)
    return {index: found for index, found in tokens.items() if index not in aborted}


def check_met(tally: Tally, spec: ModelSpec) -> None:
    """That 200 schedules met what they are for. Where every layer has a window, a sequence stops to grow once its
    window is full, and whoever was admitted has room for it: hardly anything is preempted."""
    assert min(tally.cached, tally.aborted) > 10, tally
    assert tally.preempted > 1 or all(group.window is not None for group in spec.kv_groups()), tally


def hold(checkpoint: Checkpoint, maker: Maker, count: int, seconds: float | None = None) -> Tally:
    """Raise unless each of this number of schedules brings every request its own tokens. With `seconds`, none begins
    after as many, but for the first."""
    ends_s = None if seconds is None else time.monotonic() + seconds

    @cache
    def alone(prompt: int) -> list[int]:
        whole = Schedule(16, 8, 64, 1, ((0, prompt),), ())
        tokens = played(checkpoint, whole, maker, Tally())[0]
        assert len(tokens) == MAX_TOKENS
        return tokens

    tally = Tally()
    for seed in range(count):
        if seed and ends_s is not None and time.monotonic() > ends_s:
            break
        schedule = Schedule.drawn(seed, maker.block_sizes, maker.most_more)
        for index, found in played(checkpoint, schedule, maker, tally).items():
            assert found == alone(schedule.arrivals[index][1]), (seed, index)
        tally.schedules += 1
    return tally
