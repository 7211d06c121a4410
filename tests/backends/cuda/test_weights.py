"""Weights on the device against the checkpoint's own numbers: where each lies in a fused matrix, and in what type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.models.kind_files import tiny_model, write_of_kinds
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import weights as weights_module
from twostroke.backends.cuda.layer_weights import DenseWeights
from twostroke.backends.cuda.model_matrices import held_weight_bytes
from twostroke.backends.cuda.moe import MoeWeights
from twostroke.backends.cuda.weights import Progress, Weights
from twostroke.core.formats import Formats
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind


def loaded(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, progress: Progress | None = None
) -> Weights:
    weights, loader = Weights.placed(checkpoint, device, dtype)
    loader.fill(progress)
    return weights


def stored(checkpoint: Checkpoint, *names: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([checkpoint.tensors[name].to_float32() for name in names]))


def assert_same(ours: torch.Tensor | None, expected: torch.Tensor) -> None:
    assert ours is not None
    assert torch.equal(ours.cpu(), expected.to(ours.dtype))


@pytest.fixture
def llama_bias(tmp_path: Path) -> Checkpoint:
    return load_checkpoint(make_tiny("llama_bias", tmp_path)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_that_read_the_same_input_are_one(llama_bias: Checkpoint, device: str, dtype: torch.dtype) -> None:
    weights = loaded(llama_bias, torch.device(device), dtype)
    assert len(weights.layers) == llama_bias.spec.num_layers
    for index, layer in enumerate(weights.layers):
        at, mix = f"layers.{index}.", layer.mix
        assert mix.qkv.weight.dtype == dtype and mix.qkv.weight.is_contiguous()
        assert_same(mix.qkv.weight, stored(llama_bias, f"{at}q", f"{at}k", f"{at}v"))
        assert mix.qkv.bias is not None and mix.o.bias is not None
        assert_same(mix.qkv.bias, stored(llama_bias, f"{at}q_bias", f"{at}k_bias", f"{at}v_bias"))
        assert_same(mix.o.weight, stored(llama_bias, f"{at}o"))
        assert_same(mix.o.bias, stored(llama_bias, f"{at}o_bias"))
        assert_same(layer.attention_norm, stored(llama_bias, f"{at}attention_norm"))
        assert_same(layer.mlp_norm, stored(llama_bias, f"{at}mlp_norm"))
        assert isinstance(layer.mlp, DenseWeights)
        assert_same(layer.mlp.gate_up.weight, stored(llama_bias, f"{at}gate", f"{at}up"))
        assert_same(layer.mlp.down.weight, stored(llama_bias, f"{at}down"))
        assert mix.q_norm is mix.k_norm is layer.post_attention_norm is layer.post_mlp_norm is None
    assert_same(weights.embedding, stored(llama_bias, "embedding"))
    assert_same(weights.final_norm, stored(llama_bias, "final_norm"))
    assert_same(weights.head.weight, stored(llama_bias, "output"))


@pytest.mark.filterwarnings("error")
def test_files_that_are_mapped_to_be_read_raise_no_warning(llama_bias: Checkpoint, device: str) -> None:
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        loaded(llama_bias, torch.device(device), torch.float32)
    finally:
        torch.set_warn_always(before)


def test_what_a_family_has_beside(tmp_path: Path, device: str) -> None:
    checkpoint = load_checkpoint(make_tiny("gemma3", tmp_path)[0])
    weights = loaded(checkpoint, torch.device(device), torch.float32)
    assert checkpoint.spec.tied_embeddings and weights.head.weight is weights.embedding
    layer, mix = weights.layers[1], weights.layers[1].mix
    for holder, name in ((mix, "q_norm"), (mix, "k_norm"), (layer, "post_attention_norm"), (layer, "post_mlp_norm")):
        assert_same(getattr(holder, name), stored(checkpoint, f"layers.1.{name}"))
    assert mix.qkv.bias is mix.o.bias is None


def test_every_expert_lies_in_its_place(tmp_path: Path, device: str) -> None:
    checkpoint = load_checkpoint(make_tiny("mixtral", tmp_path)[0])
    weights = loaded(checkpoint, torch.device(device), torch.float32)
    moe = checkpoint.spec.moe
    assert moe is not None
    for index, layer in enumerate(weights.layers):
        assert isinstance(layer.mlp, MoeWeights)
        assert_same(layer.mlp.router, stored(checkpoint, f"layers.{index}.router"))
        for expert in range(moe.num_experts):
            at = f"layers.{index}.experts.{expert}."
            assert_same(layer.mlp.gate_up.weight[expert], stored(checkpoint, f"{at}gate", f"{at}up"))
            assert_same(layer.mlp.down.weight[expert], stored(checkpoint, f"{at}down"))


@pytest.mark.parametrize("kind", [WeightKind.Q5_0, WeightKind.Q3_K, WeightKind.IQ2_XS, WeightKind.MXFP4])
def test_experts_of_gguf_kinds_come_out_as_their_numbers(kind: WeightKind, tmp_path: Path, device: str) -> None:
    model = tiny_model(experts=True)
    checkpoint = load_checkpoint(write_of_kinds(model, tmp_path / "model.gguf", lambda _: kind))
    mlp = loaded(checkpoint, torch.device(device), torch.float32).layers[0].mlp
    assert isinstance(mlp, MoeWeights)
    assert_same(mlp.gate_up.weight, model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"])
    assert_same(mlp.down.weight, model.state_dict()["model.layers.0.mlp.experts.down_proj"])


@pytest.mark.parametrize("kind", [WeightKind.Q8_0, WeightKind.Q4_0, WeightKind.F16, WeightKind.BF16])
def test_stored_kinds_come_out_as_their_numbers(
    kind: WeightKind, tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quantised ones in slices of a few rows, the last one shorter."""
    monkeypatch.setattr(weights_module, "SLICE_VALUES", 64 * 7)
    folder, _ = make_tiny("llama", tmp_path, num_hidden_layers=1)
    drawn = random_checkpoint(folder, kind)
    # As a file would hold them: bytes that are there, not a tensor that a backend may draw for itself.
    tensors = {name: tensor.rows(0, tensor.shape[0]) for name, tensor in drawn.tensors.items() if len(tensor.shape) > 1}
    checkpoint = replace(drawn, tensors={**drawn.tensors, **tensors})
    assert checkpoint.tensors["layers.0.q"].kind is kind
    weights = loaded(checkpoint, torch.device(device), torch.float32)
    assert_same(weights.layers[0].mix.qkv.weight, stored(checkpoint, "layers.0.q", "layers.0.k", "layers.0.v"))
    assert_same(weights.head.weight, stored(checkpoint, "output"))


def test_random_weights_are_drawn_on_the_device_alike_every_time(tmp_path: Path, device: str) -> None:
    folder, _ = make_tiny("qwen3_moe", tmp_path)
    one, same, other = (
        loaded(random_checkpoint(folder, WeightKind.BF16, seed=seed), torch.device(device), torch.float32)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one.embedding, same.embedding) and not torch.equal(one.embedding, other.embedding)
    assert torch.equal(one.layers[2].mix.qkv.weight, same.layers[2].mix.qkv.weight)
    assert not torch.equal(one.layers[0].mix.qkv.weight, one.layers[1].mix.qkv.weight), (
        "each tensor has numbers of its own"
    )
    mlp = one.layers[0].mlp
    assert isinstance(mlp, MoeWeights) and not torch.equal(mlp.down.weight[0], mlp.down.weight[1])
    hidden = one.embedding.shape[1]
    assert one.layers[0].mix.qkv.weight.std().item() == pytest.approx(hidden**-0.5, rel=0.1)
    assert one.final_norm.mean().item() == pytest.approx(1.0, abs=0.1)


def test_progress_ends_with_all_of_it(llama_bias: Checkpoint, device: str) -> None:
    told: list[tuple[int, int]] = []
    weights = loaded(llama_bias, torch.device(device), torch.bfloat16, lambda done, total: told.append((done, total)))
    assert weights.embedding.dtype == torch.bfloat16
    assert told == sorted(told) and len(told) == len(llama_bias.tensors)
    held_bytes = held_weight_bytes(llama_bias, Formats("bf16", "bf16", "bf16"))
    assert told[-1] == (held_bytes, held_bytes)
