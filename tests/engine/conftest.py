"""Engines over the real SmolLM2, one for each backend and each way of running that the tests compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from twostroke.config import EngineConfig, KVConfig
from twostroke.engine.build import assemble
from twostroke.engine.offline import LLM
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.text.loading import load_tokenizer
from twostroke.text.tokenizer import Tokenizer

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


def first_layers(checkpoint: Checkpoint, num_layers: int) -> Checkpoint:
    """The model cut short: it says nothing sensible, and is quick enough for numpy."""
    spec = replace(checkpoint.spec, layers=checkpoint.spec.layers[:num_layers])
    return replace(checkpoint, spec=spec, tensors={name: checkpoint.tensors[name] for name in spec.tensor_shapes()})


MakeLLM = Callable[[EngineConfig], LLM]


@pytest.fixture(scope="session", params=["reference", "cpu"])
def make_llm(request: pytest.FixtureRequest, smollm2: tuple[Checkpoint, Tokenizer]) -> Iterator[MakeLLM]:
    """Builds an LLM on the backend under test: the whole SmolLM2 on the CPU backend, its first layers on the
    reference. The same config gives the same LLM again."""
    made: dict[EngineConfig, LLM] = {}
    checkpoint, tokenizer = smollm2
    if request.param == "reference":
        checkpoint = first_layers(checkpoint, 3)

    def make(config: EngineConfig) -> LLM:
        config = replace(config, backend=request.param, threads=2)
        if config not in made:
            made[config] = LLM.from_assembly(assemble(checkpoint, tokenizer, config))
        return made[config]

    yield make
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="session")
def smollm2_llm(smollm2: tuple[Checkpoint, Tokenizer]) -> Iterator[LLM]:
    """The whole model, on the backend that `auto` takes: for what only a real answer can show."""
    with LLM.from_assembly(assemble(*smollm2, WAYS["plain"])) as llm:
        yield llm
