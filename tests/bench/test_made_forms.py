"""Forms that the bench makes: they stand for the weights that they were made of, in the bits that the form has."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.made_forms import MADE, PARTS, in_form, made
from tests.models.tiny_checkpoints import make_tiny
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind

BITS_AND_ERROR = {
    "fp8-tensor": (8, 0.03), "fp8-blocks": (8, 0.03), "gptq-order": (4.13, 0.13), "q4_0": (4.5, 0.1),
    "int8": (8.03, 0.01), "gptq": (4.13, 0.13), "awq": (4.16, 0.11), "nvfp4": (4.5, 0.1), "mxfp4": (4.25, 0.12),
    "q4_k": (4.5, 0.08), "q5_k": (5.5, 0.04), "q6_k": (6.5625, 0.02),
}  # fmt: skip
"""Of a matrix of normal numbers: bits a weight, and the error's share of its root mean square at most."""


@pytest.mark.parametrize("form", MADE)
def test_a_matrix_is_near_what_it_was_made_of(form: str) -> None:
    values = np.random.default_rng(0).standard_normal((32, 1024)).astype(np.float32)
    values[0], values[1, :256] = 0, 0
    tensor = made("", form, values)
    meant = tensor.to_float32()
    bits, most = BITS_AND_ERROR[form]
    assert 8 * tensor.nbytes / values.size == pytest.approx(bits, abs=0.01)
    error = np.sqrt(((meant - values) ** 2).mean() / (values**2).mean())
    assert most / 2 < error < most
    assert not meant[0].any()
    if form not in PARTS:  # read by who made the format
        same = gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind.name])
        np.testing.assert_array_equal(meant, same)


@pytest.mark.parametrize("form", ["q4_0", "q4_k", "q5_k", "q6_k"])
def test_short_rows_are_rounded_as_by_who_made_the_format(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its package, which a machine with a card may lack."""
    values = (np.random.default_rng(1).standard_normal((16, 576)) / 20).astype(np.float32)
    values[0, :64] = 0
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "gguf", None)
        tensor = made("", form, values)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[tensor.kind.name])
    np.testing.assert_array_equal(tensor.data, expected)


def test_a_whole_model_has_its_layers_in_the_form(tmp_path: Path) -> None:
    floats = load_checkpoint(make_tiny("llama_tied", tmp_path)[0])
    for form, kind, head in (("awq", WeightKind.INT4, WeightKind.F32), ("q4_k", WeightKind.Q5_0, WeightKind.Q8_0)):
        found = in_form(floats, form)
        assert found.tensors["layers.1.gate"].kind is kind and found.tensors["embedding"].kind is head
        assert found.tensors["layers.1.mlp_norm"] is floats.tensors["layers.1.mlp_norm"]
