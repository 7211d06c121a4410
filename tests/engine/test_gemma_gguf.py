"""EmbeddingGemma from GGUF files, as llama.cpp's converter writes them: vectors are those of transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tests.models.tiny_embedders import Embedder, make_embedder
from tests.models.tiny_gguf import write_gguf

from twostroke import LLM
from twostroke.config import EngineConfig
from twostroke.core.errors import ModelError
from twostroke.engine.build import build
from twostroke.models.loading import load_checkpoint

WINDOW = 9
"""As published: how wide it is in all. Of the checkpoints in memory it is what is seen to one side."""
KEYS = {"pooling_type": 1, "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False, True]}


def made(folder: Path) -> Embedder:
    """Files do not hold query_pre_attn_scalar: it is the size of a head."""
    embedder = make_embedder("gemma3", folder)
    for layer in embedder.model.layers:
        layer.self_attn.scaling = embedder.model.config.head_dim**-0.5
    return embedder


def write(embedder: Embedder, path: Path, *, with_dense: bool = True, **overrides: object) -> Path:
    outer = transformers.Gemma3ForCausalLM(embedder.model.config)
    outer.model.load_state_dict(embedder.model.state_dict())
    dense = {f"dense_{index}.weight": layer.weight.detach().numpy() for index, layer in enumerate(embedder.dense, 2)}
    extra = dense if with_dense else None
    return write_gguf(outer, path, None, gguf.MODEL_ARCH.GEMMA_EMBEDDING, extra, **{**KEYS, **overrides})


@pytest.mark.parametrize("with_dense", [True, False], ids=["with its matrices", "without"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_vectors_are_those_of_transformers(with_dense: bool, backend: str, tmp_path: Path) -> None:
    embedder = made(tmp_path / "folder")
    path = write(embedder, tmp_path / "model.gguf", with_dense=with_dense)
    own = embedder if with_dense else Embedder(embedder.folder, embedder.model, embedder.states)
    ids = [[5, 6, 7, 8], list(range(10, 60)), np.random.default_rng(2).integers(4, 250, 33).tolist()]
    config = EngineConfig(backend=backend, quantise="none" if backend == "cpu" else None)
    with LLM.from_assembly(build(str(path), config, text=False)) as llm:
        found = np.array(llm.embed(ids))
    expected = np.stack([own.vector(one) for one in ids])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < (1e-4 if backend == "reference" else 1e-2)


def test_a_window_that_is_felt(tmp_path: Path) -> None:
    embedder = made(tmp_path / "folder")
    checkpoint = load_checkpoint(write(embedder, tmp_path / "model.gguf"))
    assert [layer.grouped.window for layer in checkpoint.spec.layers] == [WINDOW // 2 + 1, None, WINDOW // 2 + 1]
    assert not checkpoint.spec.is_causal and not checkpoint.spec.has_output
    ids = torch.arange(10, 60)[None]
    with torch.no_grad():
        near = embedder.model(input_ids=ids).last_hidden_state
        embedder.model.config.sliding_window = 64
        assert (embedder.model(input_ids=ids).last_hidden_state - near).abs().max() > 0.01


def test_files_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    embedder = made(tmp_path / "folder")
    with pytest.raises(ModelError, match=r"gemma-embedding\.pooling_type is missing, and tokens that see each other"):
        load_checkpoint(write(embedder, tmp_path / "a.gguf", pooling_type=None))
    embedder.dense[1].weight = torch.nn.Parameter(torch.zeros(32, 95))
    with pytest.raises(ModelError, match=r"dense_3\.weight has shape \(32, 95\), and 96 numbers come in"):
        load_checkpoint(write(embedder, tmp_path / "b.gguf"))
