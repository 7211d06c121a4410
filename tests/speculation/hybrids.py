"""Engines over models whose layers keep states, with drafters that compute: their guesses are mended, so that drafts
hold as well as not, while all that a drafter reads and keeps is its own."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.speculation.test_heads import CONFIG, Room
from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.engine.build import Preparation, assemble
from twostroke.engine.offline import GenerationResult
from twostroke.models.loading import load_checkpoint
from twostroke.speculation.drafter import Ask, Proposal

CHUNKED = replace(CONFIG, max_tokens_per_step=24)
SNAPSHOT_TOKENS = 16


@pytest.fixture
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is kept at the end of every block, so that prompts of tests are found again."""
    usual = Preparation.scheduler_config
    assert isinstance(usual, property) and usual.fget is not None
    config_of = usual.fget
    often = property(lambda self: replace(config_of(self), snapshot_tokens=SNAPSHOT_TOKENS))
    monkeypatch.setattr(Preparation, "scheduler_config", often)


@contextmanager
def llm_of(folder: Path, backend: str, speculate: str, config: EngineConfig = CHUNKED) -> Iterator[LLM]:
    kind = None if backend == "reference" else "none"
    config = replace(config, backend=backend, speculate=speculate, quantise=kind)
    llm = LLM.from_assembly(assemble(load_checkpoint(folder), None, config))
    if speculate != "off":
        llm.engine.scheduler.draft(Room())
    try:
        yield llm
    finally:
        llm.close()


@dataclass
class Mended:
    """Between a speculator and a drafter: some of its guesses become what the model will say."""

    drafter: Any
    answers: list[list[int]]
    """All tokens of each answer, its prompt's before them."""

    def __post_init__(self) -> None:
        self._rng = random.Random(7)
        self._propose = self.drafter.propose
        self.drafter.propose = self.propose

    def propose(self, asks: Sequence[Ask]) -> list[Proposal]:
        found = []
        for ask, proposal in zip(asks, self._propose(asks), strict=True):
            known = self.drafter._rows[ask.seq_id].tokens
            coming = next((one[len(known) :] for one in self.answers if one[: len(known)] == known), [])
            right = coming[: self._rng.randrange(1 + max(1, len(proposal.token_ids)))]
            told = (*right, *proposal.token_ids[len(right) :])
            found.append(Proposal(told, (0.5,) * len(told)))
        return found


def answers_of(prompts: Sequence[list[int]], results: list[GenerationResult]) -> list[list[int]]:
    pairs = zip(prompts, results, strict=True)
    return [[*prompt, *sample.token_ids] for prompt, result in pairs for sample in result.samples]


def num_drafts(results: list[GenerationResult]) -> tuple[int, int]:
    """Computed, and held."""
    timings = [sample.timing for result in results for sample in result.samples]
    return sum(timing.drafts_computed for timing in timings), sum(timing.drafts_held for timing in timings)
