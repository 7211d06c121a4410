"""Quantising on load: float matrices become what was asked for, logits stay near the float ones, nothing else moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.quantised_checkpoint import mixed_checkpoint
from tests.backends.cpu.random_weights import random_tensor, tensor
from tests.backends.cpu.test_families import TOKENS, cpu_logits, reference_logits
from tests.backends.cpu.unpacking import unpack
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cpu.held_kinds import tile_kinds
from twostroke.backends.cpu.memory import Arena
from twostroke.backends.cpu.packing import pack
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.backends.cpu.weights import Weights
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.quantisation import dequantise, quantise
from twostroke.models.weights.tensor import WeightKind, from_float32

FLOATS = (WeightKind.F32, WeightKind.F16, WeightKind.BF16)


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize("held", [WeightKind.Q8_0, WeightKind.Q4_1])
def test_packed_values_are_those_of_the_quantiser(stored: WeightKind, held: WeightKind) -> None:
    weights = random_tensor(stored, 40, 96)
    values = unpack(pack([weights], Arena(1 << 16), held))
    assert np.array_equal(values[:40], dequantise(held, quantise(held, weights.to_float32())))
    assert not values[40:].any()


def test_stored_quantised_matrices_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = mixed_checkpoint(tmp_path)
    for name, stored in checkpoint.tensors.items():
        if stored.kind.is_quantised:
            assert checkpoint.held_kind(name, "q4_1") is stored.kind
    before, after = Weights.from_checkpoint(checkpoint), Weights.from_checkpoint(checkpoint, weights="q4_1")
    for one, other in zip(before.layers, after.layers, strict=True):
        assert np.array_equal(one.attention_out.parts[0].matrix.data, other.attention_out.parts[0].matrix.data)
        assert other.mlp_out.parts[0].matrix.kind is TileKind.Q4_1
    assert "3 tensors BF16 quantised to Q4_1" in after.notes
    assert not any("Q4_0" in note for note in after.notes)  # it has a tile of its own


@pytest.mark.parametrize("variant", ["llama", "llama_tied", "gemma3", "phi3"])
@pytest.mark.parametrize("held", ["q8_0", "q4_1"])
def test_quantised_on_load_is_as_if_stored_quantised(variant: str, held: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make_tiny(variant, tmp_path)[0])
    assert tile_kinds(checkpoint, held) == tuple(kind for kind in TileKind if kind.name in {held.upper(), "Q8_0"})
    assert checkpoint.held_bytes(held) < 0.5 * checkpoint.held_bytes()
    stored = {
        name: stored
        if checkpoint.held_kind(name, held) is stored.kind or name == "embedding"
        else tensor(checkpoint.held_kind(name, held), stored.to_float32(), name)
        for name, stored in checkpoint.tensors.items()
    }
    (found,) = cpu_logits(checkpoint, [[len(TOKENS)]], weights=held)
    beforehand = replace(checkpoint, tensors=stored)
    if not checkpoint.spec.tied_embeddings:
        (expected,) = cpu_logits(beforehand, [[len(TOKENS)]])
        assert np.array_equal(found, expected)
    # What is left against float arithmetic over the same weights is activations in 8 bits, and a tied head in 8.
    reference = reference_logits(beforehand)
    assert np.sqrt(((found - reference) ** 2).mean()) < 0.08 * reference.std()


def test_logits_of_a_trained_model_stay_near_those_of_floats(smollm2_path: Path) -> None:
    """The first layers of SmolLM2 as floats, against the same quantised on load."""
    whole = load_checkpoint(smollm2_path)
    spec = replace(whole.spec, layers=whole.spec.layers[:4])
    floats = {name: from_float32(name, whole.tensors[name].to_float32()) for name in spec.tensor_shapes()}
    checkpoint = replace(whole, spec=spec, tensors=floats)
    (expected,) = cpu_logits(checkpoint, [[len(TOKENS)]])
    (found,) = cpu_logits(checkpoint, [[len(TOKENS)]], weights="q8_0")
    assert 0 < np.sqrt(((found - expected) ** 2).mean()) < 0.03 * expected.std()
