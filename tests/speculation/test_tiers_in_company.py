"""KV that comes back from host memory and from disk beside all else at once: grammars, several answers, penalties and
logprobs, streams that give way, prefixes, and drafts that requests wish for or not. Answers are the plain ones."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from bench.made_head import write_made_head
from tests.engine.test_tiers import catch_up
from tests.speculation.cases import check
from tests.speculation.hybrids import Mended
from tests.speculation.random_requests import Told, play, random_requests, with_stops, with_wishes
from tests.speculation.tiny import _SIZES, SHAPES, VOCAB_SIZE, Room, make_tokenizer
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.request import Request
from twostroke.core.timing import TierTokens
from twostroke.engine.build import Assembly, assemble
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind

POOL_TOKENS = 128
"""That the device has room for: two or three streams."""
PLAIN = EngineConfig(
    max_context=128,
    backend="cpu",
    threads=1,
    quantise="none",
    kv=KVConfig(memory_bytes=8 * 10**6),
    speculate="off",
    max_running=8,
    policy="fifo",
)


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "loads", lambda *_: True)
    monkeypatch.setattr(Worth, "may_spill", lambda *_: True)


@dataclass
class Scene:
    folder: Path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        config = {**_SIZES, **SHAPES["llama"], "num_hidden_layers": 6}
        (self.folder / "config.json").write_text(json.dumps(config))
        return random_checkpoint(self.folder, WeightKind.F32, seed=5)

    @cached_property
    def head(self) -> Path:
        return write_made_head(self.folder / "head", self.checkpoint.spec, np.arange(0, VOCAB_SIZE, 3))

    @cached_property
    def requests(self) -> list[Request]:
        free = random_requests(120, make_tokenizer(), seed=21)
        return with_stops(free, play(self.assembly(PLAIN).engine, free))

    @cached_property
    def plain(self) -> Told:
        return play(self.assembly(PLAIN).engine, self.requests)

    @cached_property
    def texts(self) -> list[list[int]]:
        prompts = {one.request_id: one.prompt_token_ids for one in self.requests}
        return [[*prompts[name], *sample.token_ids] for (name, _), sample in self.plain.samples.items()]

    def assembly(self, config: EngineConfig) -> Assembly:
        return assemble(self.checkpoint, make_tokenizer(), config)

    def drafted(self, speculate: str, disk: Path) -> tuple[Told, TierTokens]:
        """In little KV of the device, with host memory and a disk behind it."""
        config = replace(PLAIN, speculate=speculate)
        ample = self.assembly(config)
        block_bytes = ample.resolved.kv_bytes * 16 // ample.resolved.kv_tokens
        ample.engine.close()
        kv = KVConfig(
            memory_bytes=block_bytes * POOL_TOKENS // 16,
            host_gb=block_bytes * 40 / 1e9,
            disk=str(disk),
            disk_gb=0.1,
        )
        engine = self.assembly(replace(config, kv=kv)).engine
        engine.scheduler.draft(Room(seed=3))
        engine.scheduler._admission.growth.more_tokens = lambda _: 0  # type: ignore[method-assign]
        for drafter in engine.backend.companion_drafters:  # type: ignore[attr-defined]
            Mended(drafter, self.texts)
        step = engine.step

        def step_and_wait() -> object:
            events = step()
            catch_up(engine)
            return events

        engine.step = step_and_wait  # type: ignore[method-assign, assignment]
        told = play(engine, with_wishes(self.requests, engine.draft_methods))
        assert engine.backend.speculator.faults == []  # type: ignore[attr-defined]
        return told, engine.scheduler.counts().tier_hit_tokens


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("method", ["suffix", "eagle3"])
def test_answers_are_the_plain_ones(scene: Scene, tmp_path: Path, method: str) -> None:
    """The second time an engine finds on disk what another has left there."""
    speculate = f"auto,eagle3:{scene.head}" if method == "eagle3" else "auto"
    asked = [request.sampling for request in scene.requests]
    assert sum(one.grammar is not None for one in asked) >= 15 and sum(one.n > 1 for one in asked) >= 8
    for is_first in (True, False):
        told, hits = scene.drafted(speculate, tmp_path)
        check(told, scene.plain)
        assert told.num_preemptions >= 20
        assert told.num_drafts(method) >= 50 and told.num_drafts("grammar") >= 10
        assert hits.host >= 100 if is_first else hits.disk >= 100
