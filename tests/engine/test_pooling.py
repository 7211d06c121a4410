"""Every pooling of `sentence-transformers`: alone, several joined, as newer files say it and as older ones do; against
its definition, and against the library where it is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.models.tiny_embedders import MODES, Embedder, make_embedder, pooled_by

from twostroke import LLM
from twostroke.config import EngineConfig

TEXTS = ["the cat sat on a mat", "prefill and decode", "what is a request? " * 3, "a"]
JOINED = [("first", "max"), ("mean", "root_mean", "weighted_mean"), tuple(reversed(MODES))]
KINDS = [*((kind,) for kind in MODES), *JOINED]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return make_embedder("bert", tmp_path_factory.mktemp("pooling") / "m")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_vectors_are_pooled_as_files_say(bert: Embedder, kinds: tuple[str, ...], is_older: bool, backend: str) -> None:
    embedder = pooled_by(bert, *kinds, is_older=is_older)
    with LLM(embedder.folder, EngineConfig(backend=backend, quantise="none", threads=2)) as llm:
        found = np.array(llm.embed(TEXTS))
        expected = np.stack([embedder.vector(llm.tokenizer.encode(text)) for text in TEXTS])
        alone = np.concatenate([np.array(llm.embed([text])) for text in TEXTS])
    assert found.shape == (len(TEXTS), 64 * len(kinds))
    assert np.abs(found - expected).max() < (1e-4 if backend == "reference" else 5e-3)
    assert np.abs(found - alone).max() < 2e-6


@pytest.mark.parametrize("kinds", [("max",), ("mean", "last")], ids="+".join)
def test_a_causal_model_is_read_whole_where_all_states_are_pooled(kinds: tuple[str, ...], tmp_path: Path) -> None:
    embedder = pooled_by(make_embedder("qwen3", tmp_path), *kinds, is_older=False)
    with LLM(embedder.folder, backend="reference") as llm:
        found = np.array(llm.embed(TEXTS))
        expected = np.stack([embedder.vector(llm.tokenizer.encode(text)) for text in TEXTS])
        assert np.abs(found - expected).max() < 1e-4
        assert llm.engine.scheduler.counts().prefix_hit_tokens == 0


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_vectors_are_those_of_sentence_transformers(bert: Embedder, kinds: tuple[str, ...], is_older: bool) -> None:
    library = pytest.importorskip("sentence_transformers")
    embedder = pooled_by(bert, *kinds, is_older=is_older)
    with LLM(embedder.folder, backend="reference") as llm:
        found = np.array(llm.embed(TEXTS))
    expected = library.SentenceTransformer(str(embedder.folder), device="cpu").encode(TEXTS)
    assert found.shape == expected.shape and np.abs(found - expected).max() < 1e-4
