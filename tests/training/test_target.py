"""What training reads of a model, against transformers: scores and what enters layers, of every family that runs, by
the backend that runs it. And what no drafter can be trained for is refused before anything is computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.models.tiny_checkpoints import make_tiny, transformers_logits, variants
from tests.models.tiny_embedders import make_embedder
from tests.models.tiny_gguf import write_gguf
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import from_float32
from twostroke.training.target import TEXTS_AT_ONCE, Target, refuse

CPU = torch.device("cpu")
TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 256, 40)]
SHORT = 17
CONFIG = EngineConfig(backend="reference", max_context=64, max_tokens_per_step=24, kv=KVConfig(memory_bytes=8_000_000))
"""Two texts share a step, and the longer is read in chunks."""
CONFIGS = {
    "reference": CONFIG,
    "cpu": replace(CONFIG, backend="cpu", quantise="none", kv=replace(CONFIG.kv, kind="f16")),
}
OFTEN = {
    "reference": (
        *("llama_tied", "gemma2", "gemma3", "phi3_longrope", "ministral3", "hunyuan_dense", "olmo2", "olmo3"),
        *("exaone4", "granite", "gemma4", "gemma4_moe", "qwen3_moe", "gpt_oss", "deepseek_v3", "lfm2_moe"),
        *("qwen3_5", "nemotron_h"),
    ),
    "cpu": ("llama", "gemma4", "qwen3_moe", "deepseek_v2", "qwen3_5"),
}
"""Of every kind of layer one; the others are slow only because they are many."""
SCALED = ("granite", "granite_moe", "granite_hybrid", "granite_hybrid_dense")
"""Their stream is transformers' but for a scale: see `models/families/granite.py`."""


def cases() -> list[object]:
    return [
        pytest.param(backend, variant, marks=() if variant in OFTEN[backend] else pytest.mark.slow)
        for backend in CONFIGS
        for variant in variants()
    ]


@contextmanager
def opened(checkpoint: Checkpoint, config: EngineConfig) -> Iterator[Target]:
    target = Target(checkpoint, config, CPU)
    try:
        yield target
        target._engine.scheduler.check()
    finally:
        target.close()


def error(found: torch.Tensor, expected: np.ndarray) -> float:
    """Of most rows: in the arithmetic of the CPU a token may meet another expert than in float32."""
    gaps = np.linalg.norm(found.numpy() - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(np.median(gaps))


@pytest.mark.parametrize(("backend", "variant"), cases())
def test_scores_and_hidden_states_are_those_of_transformers(tmp_path: Path, backend: str, variant: str) -> None:
    folder, model = make_tiny(variant, tmp_path / "tiny")
    with opened(load_checkpoint(folder), CONFIGS[backend]) as target:
        reading = target.read([TOKENS[:SHORT], [*TOKENS, 7]])
        again = target.read([[*TOKENS, 7]])
        scores = target.scores(reading.normed)
    logits = transformers_logits(model, TOKENS)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True).hidden_states
    streams = np.concatenate([states[tap][0].numpy() for tap in target.taps], axis=-1)
    if backend == "reference":
        np.testing.assert_allclose(scores[1], logits, atol=2e-3)
        np.testing.assert_allclose(scores[0, : SHORT - 1], logits[: SHORT - 1], atol=2e-3)
        assert variant in SCALED or np.abs(reading.taps[1].numpy() - streams).max() < 1e-3
    else:
        assert error(scores[1], logits) < 0.05 and error(scores[0, : SHORT - 1], logits[: SHORT - 1]) < 0.05
        assert variant in SCALED or error(reading.taps[1], streams) < 0.03
        assert torch.equal(again.taps[0], reading.taps[1]), "whatever is read beside it"
    assert not reading.taps[0, SHORT - 1 :].any(), "nothing stands behind the shorter text"


def test_a_quantised_file_is_read_as_it_is(tmp_path: Path) -> None:
    """The `gguf` package quantises, and says what is left of each weight."""
    _, model = make_tiny("qwen3", tmp_path / "floats")
    kind = gguf.GGMLQuantizationType.Q4_0
    floats = transformers_logits(model, TOKENS)

    def store(name: str, tensor: torch.Tensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType] | None:
        return None if tensor.ndim == 1 else (gguf.quantize(tensor.float().numpy(), kind), kind)

    path = write_gguf(model, tmp_path / "tiny.gguf", store)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                left = gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(left))
    with opened(load_checkpoint(path), CONFIG) as target:
        scores = target.scores(target.read([[*TOKENS, 7]]).normed)[0]
    np.testing.assert_allclose(scores, transformers_logits(model, TOKENS), atol=2e-3)
    assert error(scores, floats) > 0.05


def test_a_text_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder, _ = make_tiny("llama", tmp_path / "tiny")
    checkpoint = load_checkpoint(folder)
    broken = dict(checkpoint.tensors)
    norm = broken["layers.1.mlp_norm"]
    broken["layers.1.mlp_norm"] = from_float32(norm.name, np.full(norm.shape, np.nan, np.float32))
    complaint = pytest.raises(BackendError, match=r"a text could not be read for training: .*not finite")
    with opened(replace(checkpoint, tensors=broken), CONFIG) as target, complaint:
        target.read([TOKENS])


def test_an_engine_that_reads_takes_no_more_memory_than_that(tmp_path: Path) -> None:
    """Whatever the engine that answers was given. What does not fit side by side waits."""
    folder, _ = make_tiny("llama", tmp_path / "tiny")
    config = replace(CONFIGS["cpu"], kv=KVConfig(host_gb=1.0), max_running=64, speculate="auto")
    with opened(load_checkpoint(folder), config) as target:
        layout = target._engine.scheduler.ledger.layout
        assert layout.groups[0].num_blocks * layout.block_size == TEXTS_AT_ONCE * 64
        texts = [[(3 + 7 * number + place) % 250 for place in range(20)] for number in range(2 * TEXTS_AT_ONCE)]
        together = target.read(texts)
        for number in (0, 17, 31):
            assert torch.equal(target.read([texts[number]]).taps[0], together.taps[number])


def test_what_no_drafter_can_be_trained_for_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    embedder = make_embedder("qwen3", tmp_path / "embedder").folder
    with pytest.raises(BadRequestError, match=r"no drafter can be trained for .*: it gives vectors, and a drafter"):
        refuse(str(embedder), replace(CONFIG, max_context=None))
    folder, _ = make_tiny("llama", tmp_path / "tiny")
    with pytest.raises(BadRequestError, match="backend runs no heads, so none could draft there"):
        refuse(str(folder), replace(CONFIG, tensor_parallel=2))
    with pytest.raises(BadRequestError, match="random weights have no tokenizer"):
        refuse(str(folder), replace(CONFIG, load="random"))
    refuse(str(folder), CONFIG)
