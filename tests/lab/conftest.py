"""A tiny random model on each backend, for what is played in milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from twostroke.config import EngineConfig, KVConfig
from twostroke.engine.build import Assembly, build

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def tiny_shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture(scope="session", params=["reference", "cpu"])
def tiny(request: pytest.FixtureRequest, tiny_shape: Path) -> Iterator[Assembly]:
    config = EngineConfig(
        backend=request.param,
        threads=1,
        load="random",
        quantise="none" if request.param == "reference" else "q8_0",
        max_tokens_per_step=64,
        kv=KVConfig(memory_bytes=8_000_000),
    )
    assembly = build(str(tiny_shape), config, text=False)
    yield assembly
    assembly.engine.close()
