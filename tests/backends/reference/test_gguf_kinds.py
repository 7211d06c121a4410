"""Files of every kind that GGUF stores, experts among their matrices: the reference's logits against those of
transformers over the weights as the `gguf` package dequantises them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.backends.driver import layout_for, logits_by_prefill
from tests.models.kind_files import VOCAB_SIZE, tiny_model, write_of_kinds
from tests.models.tiny_checkpoints import transformers_logits

from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB_SIZE, 12)]


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind.is_quantised], ids=lambda kind: kind.name)
def test_a_file_of_each_kind(kind: WeightKind, tmp_path: Path) -> None:
    model = tiny_model(experts=True)
    path = write_of_kinds(model, tmp_path / "model.gguf", lambda name: kind)
    checkpoint = load_checkpoint(path)
    assert checkpoint.tensors["layers.0.experts.3.down"].kind is checkpoint.tensors["layers.0.q"].kind is kind
    layout = layout_for(checkpoint.spec, len(TOKENS), 16)
    backend = FACTORY.create(checkpoint, layout, BackendSettings(max_context=32, max_tokens_per_step=32))
    try:
        logits = logits_by_prefill(backend, TOKENS, [7])
    finally:
        backend.close()
    expected = transformers_logits(model, TOKENS)
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
