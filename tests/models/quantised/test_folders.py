"""Whole tiny checkpoints in every quantised format: their tensors, and the reference backend's logits, are those of the
float checkpoint that they stand for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backends.driver import layout_for, logits_by_prefill
from tests.models.quantised.folders import (
    ALL_FORMATS,
    FORMATS,
    Packed,
    is_packed,
    make_native_mxfp4,
    make_quantised,
    mx_parts,
    write_folder,
)
from tests.models.tiny_checkpoints import VOCAB_SIZE, make_tiny, transformers_logits

from twostroke.backends.interface import BackendSettings
from twostroke.backends.reference import FACTORY
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.loading import load_checkpoint
from twostroke.models.quantised.scheme import Activations
from twostroke.models.weights.stored_forms import ScaledTensor

TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, VOCAB_SIZE, 24)]
PLACED_OTHERWISE = {"phi3": "fused", "qwen3_moe": "experts", "gemma3_vision": "a prefix"}


def logits_of(checkpoint: Checkpoint) -> np.ndarray:
    layout = layout_for(checkpoint.spec, len(TOKENS), 16)
    backend = FACTORY.create(checkpoint, layout, BackendSettings(max_context=64, max_tokens_per_step=64))
    try:
        return logits_by_prefill(backend, TOKENS, [20])
    finally:
        backend.close()


def assert_same_tensors(found: Checkpoint, meant: Checkpoint) -> None:
    assert found.tensors.keys() == meant.tensors.keys()
    for name, tensor in meant.tensors.items():
        np.testing.assert_array_equal(found.tensors[name].to_float32(), tensor.to_float32(), err_msg=name)


@pytest.mark.parametrize("form", ALL_FORMATS)
def test_logits_are_those_of_the_floats_that_are_meant(form: str, tmp_path: Path) -> None:
    quantised, meant = (load_checkpoint(folder) for folder in make_quantised(form, tmp_path))
    scaled = [tensor for tensor in quantised.tensors.values() if isinstance(tensor, ScaledTensor)]
    assert {tensor.kind.name for tensor in scaled} == {ALL_FORMATS[form].kind} and len(scaled) == 21
    assert_same_tensors(quantised, meant)
    np.testing.assert_array_equal(logits_of(quantised), logits_of(meant))


@pytest.mark.parametrize("variant", PLACED_OTHERWISE)
@pytest.mark.parametrize("form", ["ct_int4_asym", "ct_nvfp4", "fp8_ragged_block", "fp8_tensor", "gptq_order", "awq"])
def test_fused_matrices_experts_and_prefixes(variant: str, form: str, tmp_path: Path) -> None:
    quantised, meant = (load_checkpoint(folder) for folder in make_quantised(form, tmp_path, variant))
    assert_same_tensors(quantised, meant)
    assert any(isinstance(tensor, ScaledTensor) for tensor in quantised.tensors.values())


def test_stacked_experts_in_mxfp4_blocks(tmp_path: Path) -> None:
    """The names and shapes of gpt-oss's files, in a family that runs: experts alone are quantised."""
    folder, model = make_tiny("qwen3_moe", tmp_path / "plain")
    stored, floats = {}, {}
    for name, tensor in model.state_dict().items():
        stored[name] = floats[name] = tensor.contiguous()
        if tensor.ndim == 3:
            parts = [mx_parts(expert) for expert in tensor]
            floats[name] = torch.stack([meant for _, _, meant in parts])
            del stored[name]
            blocks = torch.stack([packed for packed, _, _ in parts])
            stored[f"{name}_blocks"] = blocks.reshape(*tensor.shape[:2], -1, 16)
            stored[f"{name}_scales"] = torch.stack([scales for _, scales, _ in parts])
    config = json.loads((folder / "config.json").read_text())
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    meant = load_checkpoint(write_folder(tmp_path / "meant", config, floats))
    found = load_checkpoint(write_folder(tmp_path / "found", config | {"quantization_config": mxfp4}, stored))
    assert_same_tensors(found, meant)
    kinds = {name.rpartition(".")[2] for name, tensor in found.tensors.items() if tensor.kind.is_quantised}
    assert kinds == {"gate", "up", "down"}
    np.testing.assert_array_equal(logits_of(found), logits_of(meant))


def test_gpt_oss_as_its_makers_store_it(tmp_path: Path) -> None:
    """Transformers runs the floats that its blocks stand for."""
    folder, model = make_native_mxfp4(tmp_path)
    found = load_checkpoint(folder)
    kinds = {name.rpartition(".")[2] for name, tensor in found.tensors.items() if tensor.kind.is_quantised}
    assert kinds == {"gate", "up", "down"}
    np.testing.assert_allclose(logits_of(found), transformers_logits(model, TOKENS), rtol=1e-3, atol=1e-4)


def test_stacked_experts_in_fp8_blocks(tmp_path: Path) -> None:
    folder, model = make_tiny("qwen3_moe", tmp_path / "plain")
    stored, floats = {}, {}
    form = FORMATS["fp8_block"]
    for name, tensor in model.state_dict().items():
        stored[name] = floats[name] = tensor.contiguous()
        packed: list[Packed] = []
        if tensor.ndim == 3:
            packed, ending = [form.pack(expert) for expert in tensor], "_scale_inv"
            floats[name] = torch.stack([one.meant for one in packed])
            stored[name] = torch.stack([one.tensors["weight"] for one in packed])
            stored[name + ending] = torch.stack([one.tensors["weight_scale_inv"] for one in packed])
        elif is_packed(name, tensor):
            one = form.pack(tensor)
            floats[name], stored[name] = one.meant, one.tensors["weight"]
            stored[f"{name}_scale_inv"] = one.tensors["weight_scale_inv"]
    config = json.loads((folder / "config.json").read_text())
    meant = load_checkpoint(write_folder(tmp_path / "meant", config, floats))
    found = load_checkpoint(write_folder(tmp_path / "found", config | {"quantization_config": form.config}, stored))
    assert_same_tensors(found, meant)


def test_codes_stay_in_the_memory_map(tmp_path: Path) -> None:
    for form in ("ct_int4", "ct_fp8_block", "ct_nvfp4"):
        tensor = load_checkpoint(make_quantised(form, tmp_path / form)[0]).tensors["layers.0.q"]
        assert isinstance(tensor, ScaledTensor)
        assert not tensor.parts().codes.flags.owndata and not tensor.parts().codes.flags.writeable


def test_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    folder, _ = make_quantised("ct_int4", tmp_path)
    checkpoint = load_checkpoint(folder)
    stored = load_file(folder / "model.safetensors")
    assert checkpoint.weight_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert checkpoint.held_bytes() == checkpoint.weight_bytes
    folder, _ = make_quantised("ct_int4", tmp_path / "fused", "phi3")
    fused, whole = load_checkpoint(folder), "model.layers.0.self_attn.qkv_proj."
    expected = sum(t.nbytes for name, t in load_file(folder / "model.safetensors").items() if name.startswith(whole))
    assert expected - 3 <= sum(fused.tensors[f"layers.0.{name}"].nbytes for name in "qkv") <= expected


def test_static_scales_of_inputs_are_kept(tmp_path: Path) -> None:
    for form in ("ct_fp8_tensor", "fp8_static", "modelopt_fp8"):
        tensor = load_checkpoint(make_quantised(form, tmp_path / form)[0]).tensors["layers.0.q"]
        assert isinstance(tensor, ScaledTensor) and tensor.activations is not None
        assert tensor.activations == Activations("fp8", "tensor", is_dynamic=False, scale=0.125)
    tensor = load_checkpoint(make_quantised("fp8_block", tmp_path / "block")[0]).tensors["layers.0.q"]
    assert isinstance(tensor, ScaledTensor) and tensor.activations is not None
    assert tensor.activations == Activations("fp8", "group", is_dynamic=True, group_size=32)
