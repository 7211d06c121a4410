"""The bench's GGUF files of random weights: what the `gguf` package reads of them, and that a backend takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bench.gguf_shape import KINDS, ensure_shape
from twostroke import backends
from twostroke.models.loading import load_checkpoint
from twostroke.models.weights.tensor import WeightKind

SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
TINY: dict[str, dict[str, Any]] = {
    "delta-net-0.7b": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4},
    "granite-moe-3b-a0.6b": {"hidden_size": 256, "intermediate_size": 256, "shared_intermediate_size": 256}
    | {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"], "num_local_experts": 8}
    | {"num_attention_heads": 4, "mamba_n_heads": 8},
    "lfm2-moe-4b-a0.8b": {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 4}
    | {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_attention_heads": 8},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TINY)
def test_a_shape_becomes_a_file_that_both_sides_read(shape: str, kind: str, tmp_path: Path) -> None:
    published = json.loads((SHAPES / shape / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(published | TINY[shape] | {"vocab_size": 512}), encoding="utf-8")
    path = ensure_shape(tmp_path, kind, tmp_path)
    checkpoint = load_checkpoint(path)  # refuses what is missing, misshapen or left over
    backends.choose("cpu", checkpoint)
    matrices = [one for one in gguf.GGUFReader(path).tensors if one.tensor_type.name == kind.upper()]
    assert len(matrices) > 4
    for tensor in matrices:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        inputs = int(tensor.shape[0])
        assert values.std() == pytest.approx(inputs**-0.5, rel=0.3)
        assert abs(values.mean()) < 0.3 * values.std()
    embedding = checkpoint.tensors["embedding"]
    assert embedding.kind is (WeightKind.Q6_K if kind == "q4_k" else WeightKind.Q8_0)
    assert np.std(embedding.to_float32()) == pytest.approx(256**-0.5, rel=0.15)
    assert ensure_shape(tmp_path, kind, tmp_path) == path
