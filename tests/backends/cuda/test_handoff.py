"""A prompt read by one engine and answered by another, where one of them or both compute on a card: the tokens are
those of one engine alone where nothing is rounded, and one byte a number stays one byte on its way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.backends.cuda.engines import Sizes, request
from tests.engine.test_handoff import KEY, play, read, settle
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny

from twostroke.config import KVConfig
from twostroke.core.request import Request
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.engine.tiers import Computed, ledger_of, make_tiers
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.scheduling.scheduler import Scheduler

SIZES = Sizes(step_tokens=48, max_rows=2, max_context=96, num_blocks=16)
COMPUTED = Computed("float32", "rope as stored")
VARIANTS = {
    "llama": {"num_hidden_layers": 2},
    "gemma2": {"num_hidden_layers": 2},  # a group of windows beside one of all
    "deepseek_v3": {},  # latents
    "lfm2": {},  # states
}
REFERENCE = "reference"


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models read faster than anything is moved."""
    monkeypatch.setattr(Worth, "loads", lambda *_: True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {name: load_checkpoint(make_tiny(name, folder / name, **changes)[0]) for name, changes in VARIANTS.items()}


def engine_of(checkpoint: Checkpoint, device: str, name: str, *, kv: str | None = None, block_size: int = 16) -> Engine:
    """`device` may be the reference, which is none."""
    sizes = replace(SIZES, block_size=block_size)
    layout = sizes.layout(checkpoint)
    is_reference = device == REFERENCE
    backend = sizes.on_reference(checkpoint) if is_reference else sizes.on_device(checkpoint, device, kv=kv)
    config = KVConfig(host_gb=0.002, block_size=block_size)
    fleet = FleetSettings(KEY, "sockets", engine_id=name)
    tiers, _ = make_tiers(config, layout, checkpoint, backend, lambda *_: 1.0, COMPUTED, fleet)
    scheduler = Scheduler(sizes.config, layout, ledger=ledger_of(sizes.config, layout, tiers))
    return Engine(scheduler, backend, checkpoint.spec.vocab_size)


def requests() -> list[Request]:
    """Greedy and drawn; the third begins as the first."""
    first = [7 * number % VOCAB_SIZE for number in range(41)]
    prompts = ([*first], [5 * number % VOCAB_SIZE for number in range(53)], [*first[:33], *range(3, 33)])
    drawn: tuple[dict[str, object], ...] = ({}, {"temperature": 0.8, "seed": 4}, {})
    return [
        request(f"r{number}", prompt, max_tokens=4, ignore_eos=True, **more)
        for number, (prompt, more) in enumerate(zip(prompts, drawn, strict=True))
    ]


def tokens_by_two_and_alone(reader: Engine, writer: Engine, alone: Engine, num_requests: int = 3) -> int:
    """How many tokens came over."""
    num_handed = 0
    try:
        for asked in requests()[:num_requests]:
            handoff = read(reader, asked)
            assert handoff is not None and handoff.num_tokens
            written = play(writer, requests=[(writer, replace(asked, handoff=handoff))])
            assert written.tokens == play(alone, requests=[(alone, asked)]).tokens
            timing = written.last[f"{asked.request_id}.0"].timing
            assert timing is not None and timing.handoff is not None
            assert timing.handoff.why_not in (None, "all of it is cached here")
            num_handed += timing.tier_tokens.peer
            settle(reader, writer)
    finally:
        for engine in (reader, writer, alone):
            engine.close()
    return num_handed


@pytest.mark.parametrize("name", VARIANTS)
def test_between_two_devices_tokens_are_those_of_one(models: dict[str, Checkpoint], device: str, name: str) -> None:
    engines = [engine_of(models[name], device, own) for own in ("reader", "writer", "alone")]
    assert tokens_by_two_and_alone(*engines, num_requests=3 if name == "llama" else 1) >= 32


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_a_byte_a_number_travels_as_it_is(models: dict[str, Checkpoint], device: str, kv: str) -> None:
    engines = [engine_of(models["llama"], device, own, kv=kv) for own in ("reader", "writer", "alone")]
    assert tokens_by_two_and_alone(*engines, num_requests=2) >= 64


@pytest.mark.parametrize(
    ("theirs", "own", "block_sizes"),
    [(REFERENCE, "device", (16, 16)), ("device", REFERENCE, (16, 16)), ("device", "device", (16, 32))],
    ids=["to a device", "from a device", "blocks of another size"],
)
def test_blocks_are_turned_into_what_the_other_side_has(
    models: dict[str, Checkpoint], device: str, theirs: str, own: str, block_sizes: tuple[int, int]
) -> None:
    """Both in float32, so nothing is rounded."""
    on = {REFERENCE: REFERENCE, "device": device}
    reader = engine_of(models["gemma2"], on[theirs], "reader", block_size=block_sizes[0])
    writer, alone = (engine_of(models["gemma2"], on[own], name, block_size=block_sizes[1]) for name in ("w", "alone"))
    assert tokens_by_two_and_alone(reader, writer, alone) >= 32
