"""What a first prompt needs is there when an engine is loaded: its prefill waits for no page of weights or KV."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.resident import needs_pagemap, pages_given
from tests.models.tiny_checkpoints import make_tiny

from twostroke import LLM, SamplingParams
from twostroke.backends.cpu import packed_cache
from twostroke.backends.cpu.backend import CpuBackend
from twostroke.backends.cpu.kv_store import TOUCHED_BYTES
from twostroke.config import EngineConfig, KVConfig
from twostroke.engine.build import assemble
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint

PROMPT = list(range(3, 43))
CONFIG = EngineConfig(backend="cpu", max_context=128, kv=KVConfig(memory_bytes=64 << 20))


@needs_pagemap
def test_the_first_prompt_meets_no_missing_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights packed now, and of the same mapped from the packed cache."""
    monkeypatch.setattr(packed_cache, "_folder", lambda: tmp_path / "packed")  # compiled code is where it always is
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    checkpoint = load_checkpoint(make_tiny("llama", tmp_path / "model")[0])
    for _ in range(2):
        _answer_without_missing_pages(checkpoint)
    assert len(list((tmp_path / "packed").iterdir())) == 1


def _answer_without_missing_pages(checkpoint: Checkpoint) -> None:
    with LLM.from_assembly(assemble(checkpoint, None, CONFIG)) as llm:
        backend = llm.engine.backend
        assert isinstance(backend, CpuBackend)
        for layer in backend.model.weights.layers:
            for projection in (layer.attention_in, layer.attention_out, layer.mlp_in, layer.mlp_out):
                assert all(pages_given(part.matrix.data).all() for part in projection.parts)
        layers = [place.memory for place in backend.model.kv.places.values()]
        before = [pages_given(memory) for memory in layers]
        result = llm.generate(PROMPT, SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))[0]
        assert len(result.token_ids) == 20
        after = [pages_given(memory) for memory in layers]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    # Given is what a first conversation takes, not a huge page of every layer, and not the whole store.
    assert 0 < sum(int(pages.sum()) for pages in after) <= TOUCHED_BYTES // mmap.PAGESIZE + 2 * len(layers)
