"""Models whose layers keep states, on the device: whatever company a request has, with prefixes found again by their
snapshots, drafts that hold or do not, preemption and aborted neighbours, its greedy tokens are those that the reference
gives it alone. A schedule a family in each run; many with the marker `slow`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.backends.cuda.engines import Sizes
from tests.engine.test_family_schedules import MAX_CONTEXT, MAX_TOKENS, PROMPTS, Schedule, Tally
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.interface import Backend
from twostroke.core.events import TokenEvent
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts, Step
from twostroke.engine.engine import Engine
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
}
MANY = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
MOST_STEPS = 2000


class Guessing(Drafting):
    """The tokens that will come, often with a wrong one among them."""

    def __init__(self, answers: Sequence[Sequence[int]], arrivals: Sequence[tuple[int, int]], seed: int) -> None:
        self._answers, self._arrivals, self._random = answers, arrivals, random.Random(seed)

    def drafts(self, stream: Stream, most: int) -> Drafts | None:
        answer = self._answers[self._arrivals[int(stream.request.request_id)][1]]
        known = stream.num_output
        guesses = list(answer[known : known + 10])
        count = min(most, self._random.randint(0, 5))
        if not guesses or not count:
            return None
        if self._random.random() < 0.5:
            guesses[self._random.randrange(len(guesses))] ^= 1
        return Drafts(count, tuple(guesses), start=len(stream.tokens))


@dataclass
class Heard:
    """What schedules brought about: properties that nothing met would prove nothing."""

    tally: Tally
    advanced: int = 0  # by several tokens at once
    restored: int = 0
    saved_behind_drafts: int = 0

    def step(self, step: Step, result: Any) -> None:
        self.advanced += any(len(came) > 1 for came in result.sampled.values())
        self.restored += len(step.restores)
        self.saved_behind_drafts += bool(step.saves) and step.has_drafts


def sizes_of(schedule: Schedule) -> Sizes:
    return Sizes(
        step_tokens=schedule.step_tokens,
        max_rows=min(schedule.max_running, 4),
        max_context=MAX_CONTEXT,
        block_size=schedule.block_size,
        num_blocks=schedule.num_blocks,
    )


def engine_of(
    checkpoint: Checkpoint, backend: Backend, sizes: Sizes, drafting: Drafting | None = None, host_slots: int = 0
) -> Engine:
    layout = sizes.layout(checkpoint)
    config = SchedulerConfig(
        max_context=MAX_CONTEXT, max_tokens_per_step=sizes.step_tokens, max_running=sizes.max_rows, snapshot_tokens=1
    )
    ledger = None
    if host_slots:
        assert isinstance(backend, CudaBackend)
        slots = [host_slots] * len(layout.groups)
        tiers = KVTiers(HostTier(slots), backend.block_format, backend.keep_blocks(slots))
        ledger = KVLedger(layout, tiers=tiers, snapshot_tokens=1)
    most = backend.max_drafts if isinstance(backend, CudaBackend) else 0
    scheduler = Scheduler(config, layout, ledger=ledger, drafting=drafting, max_drafts=most)
    return Engine(scheduler, backend, checkpoint.spec.vocab_size)


def played(engine: Engine, schedule: Schedule, heard: Heard) -> dict[int, list[int]]:
    """By arrival, the tokens of those that came to their end."""
    tokens: dict[int, list[int]] = {index: [] for index in range(len(schedule.arrivals))}
    engine.on_step = heard.step
    for step in range(MOST_STEPS):
        for index, (when, prompt) in enumerate(schedule.arrivals):
            if when == step:
                engine.add(Request(str(index), PROMPTS[prompt], GREEDY))
        for when, index in schedule.aborts:
            if when == step:
                engine.abort(str(index))
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens[int(event.request_id)] += event.token_ids
                if event.timing is not None:
                    heard.tally.cached += event.timing.cached_tokens > 0
                    heard.tally.preempted += event.timing.preemptions > 0
        if step > schedule.arrivals[-1][0] and not engine.busy:
            break
    engine.scheduler.check()
    engine.close()
    aborted = {index for _, index in schedule.aborts}
    heard.tally.aborted += len(aborted)
    return {index: found for index, found in tokens.items() if index not in aborted}


def alone(checkpoint: Checkpoint) -> list[list[int]]:
    """Of every prompt, what the reference answers to it by itself."""
    answers = []
    for prompt in range(len(PROMPTS)):
        schedule = Schedule(16, 8, 64, 1, ((0, prompt),), ())
        sizes = sizes_of(schedule)
        engine = engine_of(checkpoint, sizes.on_reference(checkpoint), sizes)
        answers.append(played(engine, schedule, Heard(Tally()))[0])
        assert len(answers[-1]) == MAX_TOKENS
    return answers


def hold(checkpoint: Checkpoint, device: str, seeds: Sequence[int], host_slots: int = 0) -> Heard:
    answers, heard = alone(checkpoint), Heard(Tally())
    for seed in seeds:
        schedule = Schedule.drawn(seed, "cpu")
        sizes = sizes_of(schedule)
        drafting = Guessing(answers, schedule.arrivals, seed) if seed % 2 else None
        backend = sizes.on_device(checkpoint, device)
        engine = engine_of(checkpoint, backend, sizes, drafting, host_slots)
        for index, found in played(engine, schedule, heard).items():
            assert found == answers[schedule.arrivals[index][1]], (seed, index)
    return heard


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param), **FAMILIES[request.param])
    return load_checkpoint(folder)


def test_a_schedule_with_drafts(family: Checkpoint, device: str) -> None:
    heard = hold(family, device, [3])
    assert min(heard.advanced, heard.restored, heard.saved_behind_drafts) > 0, heard


@pytest.mark.slow
def test_many_schedules(family: Checkpoint, device: str) -> None:
    heard = hold(family, device, range(MANY))
    tally = heard.tally
    assert min(tally.cached, tally.aborted, heard.advanced, heard.restored, heard.saved_behind_drafts) > 10, heard
    assert tally.preempted > 1


@pytest.mark.slow
def test_with_tiers_behind_the_device(family: Checkpoint, device: str) -> None:
    hold(family, device, range(12), host_slots=40)
