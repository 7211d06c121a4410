"""A prompt read by one engine and answered by another, of models whose layers keep states: these go along, as they were
behind the prompt's last whole block."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_handoff import KEY, play, read, settle
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

HYBRIDS = (
    ("lfm2", "reference"),
    ("qwen3_5", "reference"),
    ("granite_hybrid", "reference"),
    ("lfm2", "cpu"),
    ("qwen3_5", "cpu"),
    ("granite_hybrid", "cpu"),
)


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "loads", lambda *_: True)


def make_engine(checkpoint: Checkpoint, backend: str, name: str, block_size: int = 16, **kv: Any) -> Engine:
    sizes = {"memory_bytes": 8_000_000, "host_gb": 0.02, **kv}
    config = EngineConfig(
        backend=backend,
        threads=1,
        max_context=256,
        max_running=8,
        kv=KVConfig(block_size=block_size, **sizes),
    )
    return assemble(checkpoint, None, config, FleetSettings(KEY, "sockets", engine_id=name)).engine


@pytest.fixture(scope="module", params=HYBRIDS, ids=" on ".join)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, str]:
    variant, backend = request.param
    return load_checkpoint(make_tiny(variant, tmp_path_factory.mktemp(variant))[0]), backend


@pytest.fixture
def fleet(hybrid: tuple[Checkpoint, str]) -> Iterator[tuple[Engine, Engine, Engine]]:
    engines = [make_engine(*hybrid, name) for name in ("reader", "writer", "alone")]
    yield engines[0], engines[1], engines[2]
    for engine in engines:
        engine.close()


def requests(num: int, seed: int = 5) -> list[Request]:
    """Short and long prompts, and later ones that go on from earlier ones; greedy, drawn, and two samples of one."""
    drawn, found = random.Random(seed), []
    for number in range(num):
        before = found[-2].prompt_token_ids if number >= 2 and number % 3 == 2 else ()
        fresh = tuple(drawn.randrange(6, VOCAB_SIZE) for _ in range(drawn.choice((17, 33, 40, 75))))
        sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        if number % 4 == 1:
            sampling = replace(sampling, temperature=0.8, seed=number)
        elif number % 4 == 3:
            sampling = replace(sampling, n=2, temperature=0.8, seed=number)
        found.append(Request(f"r{number}", before + fresh, sampling))
    return found


def test_tokens_are_those_of_one_engine(fleet: tuple[Engine, Engine, Engine]) -> None:
    reader, writer, alone = fleet
    num_handed = 0
    for request in requests(8):
        handoff = read(reader, request)
        num_whole = (len(request.prompt_token_ids) - 1) // 16 * 16
        assert handoff is not None and handoff.num_tokens == num_whole
        states = [
            len(slots)
            for group, slots in zip(reader.scheduler.ledger.layout.groups, handoff.slots, strict=True)
            if group.is_state
        ]
        assert states and set(states) == {1}, "one state of each group goes, behind the last block"
        written = play(writer, requests=[(writer, replace(request, handoff=handoff))])
        assert written.tokens == play(alone, requests=[(alone, request)]).tokens
        timing = written.last[f"{request.request_id}.0"].timing
        assert timing is not None and timing.handoff is not None
        assert timing.cached_tokens == num_whole and timing.handoff.why_not in (None, "all of it is cached here")
        num_handed += timing.tier_tokens.peer
        settle(reader, writer)
    assert num_handed > 100


def test_a_conversation_goes_on_where_its_answer_was_written(fleet: tuple[Engine, Engine, Engine]) -> None:
    """Its answer's states are the writer's own snapshots: the next turn finds them, or takes the reader's."""
    reader, writer, alone = fleet
    prompt = requests(1, seed=9)[0].prompt_token_ids
    for turn in range(3):
        sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        request = Request(f"t{turn}", prompt, sampling)
        written = play(writer, requests=[(writer, replace(request, handoff=read(reader, request)))])
        assert written.tokens == play(alone, requests=[(alone, request)]).tokens
        prompt += tuple(written.tokens[f"t{turn}.0"]) + tuple(range(10 + turn, 30 + turn))
        settle(reader, writer)


def test_other_block_sizes_take_states_behind_whole_blocks_of_theirs(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny("lfm2", tmp_path)[0])
    reader, writer, alone = (
        make_engine(checkpoint, "reference", name, size)
        for name, size in (("reader", 16), ("writer", 32), ("alone", 32))
    )
    try:
        for length, why in ((70, None), (90, "its states are those behind 80 tokens, which are no whole blocks of 32")):
            prompt = tuple(random.Random(length).randrange(6, VOCAB_SIZE) for _ in range(length))
            request = Request(f"{length}", prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            written = play(writer, requests=[(writer, replace(request, handoff=read(reader, request)))])
            assert written.tokens == play(alone, requests=[(alone, request)]).tokens
            timing = written.last[f"{length}.0"].timing
            assert timing is not None and timing.handoff is not None and timing.handoff.why_not == why
            assert timing.tier_tokens.peer == (64 if why is None else 0)
            settle(reader, writer)
    finally:
        for engine in (reader, writer, alone):
            engine.close()
