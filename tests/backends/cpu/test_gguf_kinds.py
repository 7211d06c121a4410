"""Files of every kind that GGUF stores on the CPU backend, against the reference's logits over the same file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.backends.driver import layout_for, logits_by_prefill
from tests.models.kind_files import VOCAB_SIZE, tiny_model, write_of_kinds

from twostroke import machine
from twostroke.backends.cpu import FACTORY
from twostroke.backends.cpu.weights import Weights
from twostroke.backends.interface import BackendFactory, BackendSettings
from twostroke.backends.reference import FACTORY as REFERENCE
from twostroke.core.formats import STORED, Formats
from twostroke.engine.shape import shape_of
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB_SIZE, 40)]
QUANTISED = [kind for kind in BLOCK_KINDS if kind.is_quantised]
SMALL_MODELS = (WeightKind.Q5_0, WeightKind.Q5_1, WeightKind.IQ4_NL, WeightKind.IQ4_XS)
"""What llama.cpp writes in the place of K kinds where a row is no multiple of 256, and the kind most like it."""


def file_of(kinds: list[WeightKind], folder: Path, layers: int = 1) -> Checkpoint:
    """A model whose matrices are of these kinds in turn."""
    left = iter(kinds * (1 + 9 * layers // len(kinds)))
    return load_checkpoint(
        write_of_kinds(tiny_model(experts=False, layers=layers), folder / "m.gguf", lambda _: next(left))
    )


def logits_of(factory: BackendFactory, checkpoint: Checkpoint) -> np.ndarray:
    layout = layout_for(checkpoint.spec, len(TOKENS), 16)
    backend = factory.create(checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=64, threads=2))
    try:
        return logits_by_prefill(backend, TOKENS, [35])
    finally:
        backend.close()


def assert_as_reference(checkpoint: Checkpoint) -> None:
    """Activations are rounded to 8 bits, and KV to 16: logits of a random model are off by some hundredths of what
    they spread, whatever the kind. A matrix that is read wrongly moves them by as much as they spread."""
    found, expected = logits_of(FACTORY, checkpoint), logits_of(REFERENCE, checkpoint)
    assert np.abs(found - expected).max() < 0.5 * expected.std()
    assert np.abs(found - expected).mean() < 0.05 * expected.std()


def test_a_file_of_the_kinds_that_small_models_have(tmp_path: Path) -> None:
    checkpoint = file_of(list(SMALL_MODELS), tmp_path)
    assert FACTORY.supports(checkpoint) is None
    assert_as_reference(checkpoint)


@pytest.mark.slow
def test_a_file_of_all_kinds(tmp_path: Path) -> None:
    checkpoint = file_of(QUANTISED, tmp_path, layers=3)
    assert {tensor.kind for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2} == set(QUANTISED)
    assert_as_reference(checkpoint)


def test_notes_say_what_is_held_otherwise_than_it_is_stored(tmp_path: Path) -> None:
    notes = " ".join(Weights.from_checkpoint(file_of(QUANTISED, tmp_path, layers=3)).notes)
    assert "IQ4_XS repacked to IQ4_NL (4.5 bits a weight instead of 4.25, scales rounded to f16)" in notes
    assert "IQ2_XXS repacked to IQ2_S (4 bits a weight instead of 2.0625, scales rounded to f16)" in notes
    assert "IQ3_S in 4.5 bits a weight instead of 3.4375, scales rounded to f16" in notes
    assert "TQ1_0 repacked to TQ2_0 (2.5 bits a weight instead of 1.6875, exactly)" in notes
    assert "Q3_K in 3.5625 bits a weight instead of 3.4375, exactly" in notes
    for kind in (WeightKind.Q5_0, WeightKind.Q5_1, WeightKind.Q2_K, WeightKind.IQ4_NL, WeightKind.MXFP4):
        assert f"tensors {kind.name} " not in notes, "held as stored"


def test_memory_and_cost_count_weights_as_they_are_held(tmp_path: Path) -> None:
    """IQ1 and IQ2 take more in memory than in the file: what is left for KV follows, and what a step reads."""
    checkpoint = file_of([WeightKind.IQ2_XXS, WeightKind.IQ1_S], tmp_path)
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2]
    vectors = sum(tensor.nbytes for tensor in checkpoint.tensors.values() if len(tensor.shape) == 1)
    held = sum(tensor.shape[0] * tensor.shape[1] * 4 // 8 for tensor in matrices[1:]) + matrices[0].nbytes + vectors
    assert checkpoint.held_bytes() < 0.6 * held
    formats = FACTORY.formats(checkpoint)
    assert isinstance(formats, Formats) and formats.weights == STORED
    assert sum(FACTORY.held_bytes(checkpoint, name, formats) for name in checkpoint.tensors) == held
    here = machine.detect()
    space = FACTORY.memory(checkpoint, here, formats, FACTORY.suits)
    assert space.free_beside_weights_bytes == here.available_memory_bytes - held
    shape = shape_of(checkpoint, [1], partial(FACTORY.held_bytes, checkpoint, formats=formats))
    assert shape.weight_bytes_per_step == held - matrices[0].nbytes, "an embedding that is only looked up is not read"
