"""Models whose layers keep states, on the device: whatever company a request has, with prefixes found again by their
snapshots, drafts that hold or do not, preemption and aborted neighbours, its greedy tokens are those that the reference
gives it alone. A schedule a family in each run; many with the marker `slow`."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.backends.cuda.engines import Sizes, play
from tests.engine.family_schedules import MAX_CONTEXT, MAX_TOKENS, PROMPTS, Schedule, Tally
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import FACTORY
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.kv_store import KVStore
from twostroke.backends.cuda.model_matrices import MLP_KINDS, held_of
from twostroke.backends.cuda.state_shape import StateShape, mixer_of
from twostroke.backends.cuda.supported import unsupported_layers
from twostroke.backends.interface import Backend
from twostroke.core.events import TokenEvent
from twostroke.core.formats import Formats, FormatWish
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence as Stream
from twostroke.core.step import Drafts, Step
from twostroke.engine.engine import Engine
from twostroke.kv.ledger import KVLedger
from twostroke.kv.tiers.host import HostTier
from twostroke.kv.tiers.tiers import KVTiers
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.features import LAYERS_DIFFER
from twostroke.models.loading import load_checkpoint
from twostroke.models.spec import GatedDeltaNet, Mamba2, Recurrent
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.plan import Drafting
from twostroke.scheduling.scheduler import Scheduler

FAMILIES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "granite_hybrid_dense": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}
SHORT = Schedule(16, 16, 40, 2, ((0, 0), (4, 2)), ())
"""Two prompts that begin alike: the second finds the first's snapshot."""
MANY = 100
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
MOST_STEPS = 2000


class Guessing(Drafting):
    """The tokens that will come, often with a wrong one among them."""

    def __init__(self, answers: Mapping[int, Sequence[int]], arrivals: Sequence[tuple[int, int]], seed: int) -> None:
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


def alone(checkpoint: Checkpoint, prompts: Iterable[int]) -> dict[int, list[int]]:
    """Of prompts, what the reference answers to each by itself."""
    answers = {}
    for prompt in prompts:
        schedule = Schedule(16, 8, 64, 1, ((0, prompt),), ())
        sizes = sizes_of(schedule)
        engine = engine_of(checkpoint, sizes.on_reference(checkpoint), sizes)
        answers[prompt] = played(engine, schedule, Heard(Tally()))[0]
        assert len(answers[prompt]) == MAX_TOKENS
    return answers


def drawn(seeds: Iterable[int]) -> dict[int, Schedule]:
    return {seed: Schedule.drawn(seed, (8, 16), 3) for seed in seeds}


def hold(checkpoint: Checkpoint, device: str, schedules: Mapping[int, Schedule], host_slots: int = 0) -> Heard:
    """By their seeds; every other one has drafts."""
    prompts = {prompt for schedule in schedules.values() for _, prompt in schedule.arrivals}
    answers, heard = alone(checkpoint, sorted(prompts)), Heard(Tally())
    for seed, schedule in schedules.items():
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
    heard = hold(family, device, {3: SHORT})
    assert min(heard.advanced, heard.restored, heard.saved_behind_drafts) > 0, heard


def test_samples_begin_from_their_prompts_snapshot(family: Checkpoint, device: str) -> None:
    """One reads the prompt, the others begin from the state that was kept at its last block. They part at once."""
    sizes = Sizes(step_tokens=40, max_rows=4, max_context=MAX_CONTEXT, num_blocks=16)
    seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=3, n=3, ignore_eos=True)
    asked = [Request("samples", PROMPTS[0], seeded), Request("neighbour", PROMPTS[3], replace(GREEDY, max_tokens=2))]
    found, heard = {}, {}
    for place in ("reference", device):
        is_reference = place == "reference"
        backend = sizes.on_reference(family) if is_reference else sizes.on_device(family, place)
        engine, heard[is_reference] = engine_of(family, backend, sizes), Heard(Tally())
        engine.on_step = heard[is_reference].step
        found[is_reference] = play(engine, asked).tokens
        engine.close()
    assert found[False] == found[True]
    assert len({tuple(tokens) for name, tokens in found[False].items() if name.startswith("samples")}) == 3
    assert heard[False].restored == heard[True].restored == 2


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_many_schedules(family: Checkpoint, device: str) -> None:
    heard = hold(family, device, drawn(range(MANY)))
    tally = heard.tally
    assert min(tally.cached, tally.aborted, heard.advanced, heard.restored, heard.saved_behind_drafts) > 10, heard
    assert tally.preempted > 1


def test_states_lie_with_a_ring_and_travel_as_blocks_do(family: Checkpoint, device: str) -> None:
    mixer = mixer_of(family.spec)
    assert mixer is not None
    sizes, shape = Sizes(num_blocks=5), StateShape.of(mixer)
    groups = sizes.layout(family).groups
    place = next(number for number, group in enumerate(groups) if group.is_state)
    layers = groups[place].layers
    store = KVStore(family.spec, sizes.layout(family), torch.device(device), torch.bfloat16)
    assert store.states is not None and store.states[0] == place
    states = store.states[1]
    assert states.shape == (len(layers), 6, shape.values) and states.dtype == torch.float32
    assert shape.values == mixer.state_values + (shape.ring - mixer.taps + 1) * shape.conv_width
    form = store.block_formats()[place]
    assert form.num_bytes == FACTORY.kv_bytes_per_token(family, layers, Formats.of("bf16")) == 4 * states[:, 0].numel()
    states.copy_(torch.randn(states.shape))
    store.scatter(place, layers, [1, 4], store.gather(place, [3, 0]))
    assert torch.equal(states[:, 1], states[:, 3]) and torch.equal(states[:, 4], states[:, 0])


def test_what_its_kernels_do_not_have_is_declined(family: Checkpoint) -> None:
    layers = family.spec.layers
    kept = [layer for layer in layers if isinstance(layer.attention, Recurrent)]
    alone = replace(family.spec, layers=tuple(kept))
    assert unsupported_layers(alone) == "it has no models whose layers all keep states"
    other = replace(kept[0], attention=replace(kept[0].attention, taps=2))
    mixed = replace(family.spec, layers=(*layers, other))
    assert unsupported_layers(mixed) == "its layers keep states of several kinds, and this backend has room for one"
    normed = replace(family.spec, layers=(*layers, replace(kept[0], sandwich_norms=True)))
    assert unsupported_layers(normed) == LAYERS_DIFFER
    for mixer, sentence in (
        (GatedDeltaNet(2, 2, 256, 128, 4), "its delta nets have keys and values of up to 128 numbers a head"),
        (Mamba2(4, 128, 256, 1, 4), "its Mamba-2 layers keep up to 16384 numbers a head"),
    ):
        wide = tuple(replace(layer, attention=mixer) if layer in kept else layer for layer in layers)
        assert unsupported_layers(replace(family.spec, layers=wide)) == sentence


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_mlps_alone_are_held_in_few_bits(family: Checkpoint, weights: str) -> None:
    formats = FACTORY.formats(family, FormatWish(weights))
    assert isinstance(formats, Formats)
    held = held_of(family, formats)
    kinds = {name.rsplit(".", 1)[1] for name in held.codes}
    assert {"gate_up", "down"} <= kinds <= set(MLP_KINDS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_with_tiers_behind_the_device(family: Checkpoint, device: str) -> None:
    hold(family, device, drawn(range(12)), host_slots=40)
