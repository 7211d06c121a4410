"""The torch decoder that training reads hidden states from, against transformers: scores and what enters each layer."""

import numpy as np
import pytest
import torch

from tests.models.tiny_checkpoints import dense_variants, make_tiny, transformers_logits
from twostroke.core.errors import ModelError
from twostroke.models.loading import load_checkpoint
from twostroke.training.target import Target

CPU = torch.device("cpu")
TOKENS = [int(token) for token in np.random.default_rng(1).integers(3, 256, 40)]


# Granite's stream is another: see `models/families/granite.py`.
@pytest.mark.parametrize("variant", [one for one in dense_variants() if one not in ("gemma3_vision", "granite")])
def test_scores_and_hidden_states_are_those_of_transformers(tmp_path, variant):
    folder, model = make_tiny(variant, tmp_path / "tiny")
    checkpoint = load_checkpoint(folder)
    target = Target(checkpoint, CPU, len(TOKENS))
    filled_up = [TOKENS[:17] + [0] * (len(TOKENS) - 17), TOKENS]  # a shorter text beside it changes nothing
    reading = target.read(torch.tensor(filled_up), (0, 1, 2))
    expected_logits = transformers_logits(model, TOKENS)
    np.testing.assert_allclose(target.scores(reading.normed[1]).numpy(), expected_logits, atol=2e-3)
    np.testing.assert_allclose(target.scores(reading.normed[0, :17]).numpy(), expected_logits[:17], atol=2e-3)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in range(3)], dim=-1)
    np.testing.assert_allclose(reading.taps[1].numpy(), expected.numpy(), atol=1e-3)


def test_experts_are_declined(tmp_path):
    folder, _ = make_tiny("qwen3_moe", tmp_path / "tiny")
    with pytest.raises(ModelError, match="no drafter can be trained for tiny: it has experts"):
        Target(load_checkpoint(folder), CPU, 64)
