"""Whatever company a request has, and however it is cut, cached, preempted or left alone by aborted neighbours, its
greedy tokens are those of the request by itself: random schedules, for every family, on every host backend that has
it. A few in each run; 200 a family with the marker `slow`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny, variants

from twostroke.backends.cpu import FACTORY as CPU
from twostroke.backends.interface import Backend, BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.events import TokenEvent
from twostroke.core.formats import FormatWish
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.engine import Engine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.scheduler import Scheduler

OTHERS_ON_CPU = (*OTHERS_ON_CPU, "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4", "olmo3", "minimax_m2")
ON_CPU += ("gemma4", "gemma4_moe", "nemotron_h")
FAMILIES = ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite", "mistral4", "gpt_oss", "gemma4")
FAMILIES += ("gemma4_moe", "lfm2_moe", "qwen3_next", "qwen3_5", "granite_hybrid", "nemotron_h")
MAX_CONTEXT = 64
MAX_TOKENS = 9
FEW, MANY = 3, 200
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
    def drawn(seed: int, backend: str) -> Schedule:
        draw = random.Random(seed)
        block_size = 16 if backend == "cpu" else draw.choice((4, 8, 16))
        # Room for the longest alone and little more, or for all: some schedules preempt, some find prefixes.
        tight = -(-MAX_CONTEXT // block_size) + (1 if backend == "cpu" else draw.randrange(1, 4))
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

    cached: int = 0
    preempted: int = 0
    aborted: int = 0


def made(checkpoint: Checkpoint, schedule: Schedule, backend: str) -> tuple[Engine, Backend]:
    groups = tuple(
        KVGroup(group.layers, group.window, schedule.num_blocks, group.content, group.values)
        for group in checkpoint.spec.kv_groups()
    )
    layout = KVLayout(schedule.block_size, groups)
    factory = REFERENCE if backend == "reference" else CPU
    # A token that was decoded and is read again in a chunk, after a preemption say, goes another way over latents: in
    # f16 the two are near enough for greedy tokens to be the same.
    is_latent = any(group.content == "latent" for group in groups)
    formats = factory.formats(checkpoint, FormatWish(kv="f16" if is_latent and factory is CPU else None))
    assert not isinstance(formats, str), formats
    settings = BackendSettings(
        max_context=MAX_CONTEXT, max_tokens_per_step=schedule.step_tokens, formats=formats, threads=2
    )
    own = factory.create(checkpoint, layout, settings)
    config = SchedulerConfig(
        max_context=MAX_CONTEXT,
        max_tokens_per_step=schedule.step_tokens,
        max_running=schedule.max_running,
        snapshot_tokens=1,
    )
    return Engine(Scheduler(config, layout), own, checkpoint.spec.vocab_size), own


def played(checkpoint: Checkpoint, schedule: Schedule, backend: str, tally: Tally) -> dict[int, list[int]]:
    """By arrival, the tokens of those that came to their end."""
    engine, own = made(checkpoint, schedule, backend)
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


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    yield load_checkpoint(folder)


def hold(checkpoint: Checkpoint, backend: str, count: int) -> Tally:
    alone = []
    for prompt in range(len(PROMPTS)):
        whole = Schedule(16, 8, 64, 1, ((0, prompt),), ())
        alone.append(played(checkpoint, whole, backend, Tally())[0])
        assert len(alone[-1]) == MAX_TOKENS
    tally = Tally()
    for seed in range(count):
        schedule = Schedule.drawn(seed, backend)
        for index, found in played(checkpoint, schedule, backend, tally).items():
            assert found == alone[schedule.arrivals[index][1]], (seed, index)
    return tally


@pytest.fixture(scope="module", params=ON_CPU)
def cpu_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return load_checkpoint(folder)


def test_a_few_schedules_on_the_cpu(cpu_family: Checkpoint) -> None:
    hold(cpu_family, "cpu", FEW)


@pytest.mark.slow
def test_many_schedules_on_the_cpu(cpu_family: Checkpoint) -> None:
    tally = hold(cpu_family, "cpu", MANY)
    assert min(tally.cached, tally.aborted) > 10 and tally.preempted > 1, tally


def test_a_few_schedules(family: Checkpoint) -> None:
    hold(family, "reference", FEW)


@pytest.mark.slow
def test_many_schedules(family: Checkpoint) -> None:
    tally = hold(family, "reference", MANY)
    assert min(tally.cached, tally.preempted, tally.aborted) > 10, tally


def test_the_families_are_variants() -> None:
    assert set(FAMILIES) <= set(variants())
