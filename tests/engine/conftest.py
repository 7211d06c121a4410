"""Engines over the real SmolLM2, one for each backend and each way of running that the tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from twostroke.models.loading import load_checkpoint
from twostroke.text.loading import load_tokenizer
from twostroke.text.tokenizer import Tokenizer

from twostroke.config import EngineConfig, KVConfig
from twostroke.engine.build import assemble
from twostroke.engine.offline import LLM
from twostroke.models.checkpoint import Checkpoint

BYTES_PER_MB = 10**6

WAYS = {
    "plain": EngineConfig(max_context=1024, kv=KVConfig(memory_bytes=200 * BYTES_PER_MB)),
    "chunked": EngineConfig(max_context=1024, max_tokens_per_step=7, kv=KVConfig(memory_bytes=200 * BYTES_PER_MB)),
    "step by step": EngineConfig(max_context=1024, run_ahead=False, kv=KVConfig(memory_bytes=200 * BYTES_PER_MB)),
    "uncached": EngineConfig(max_context=1024, kv=KVConfig(memory_bytes=200 * BYTES_PER_MB, prefix_caching=False)),
}


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> tuple[Checkpoint, Tokenizer]:
    checkpoint = load_checkpoint(smollm2_path, name="smollm2")
    return checkpoint, load_tokenizer(checkpoint.path, checkpoint.gguf_metadata)


MakeLLM = Callable[[EngineConfig], LLM]


@pytest.fixture(scope="session", params=["reference", "cpu"])
def make_llm(request: pytest.FixtureRequest, smollm2: tuple[Checkpoint, Tokenizer]) -> Iterator[MakeLLM]:
    """Builds an LLM on the backend under test; the same config gives the same LLM again."""
    from dataclasses import replace

    made: dict[EngineConfig, LLM] = {}

    def make(config: EngineConfig) -> LLM:
        config = replace(config, backend=request.param, threads=2)
        if config not in made:
            made[config] = LLM.from_assembly(assemble(*smollm2, config))
        return made[config]

    yield make
    for llm in made.values():
        llm.close()
