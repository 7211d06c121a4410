"""Which modules are stored how: groups by name and pattern, presets, overrides, and the scales of KV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.models.quantised.folders import (
    FORMATS,
    GPTQ,
    INT4,
    arguments,
    compressed,
    is_packed,
    pack_gptq,
    write_folder,
)
from tests.models.tiny_checkpoints import make_tiny

from twostroke.core.errors import ModelError
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families.fields import Fields
from twostroke.models.loading import load_checkpoint
from twostroke.models.quantised.methods import read_quantisation
from twostroke.models.quantised.scheme import Expected, KVScheme, Layout, Role

FP8 = arguments(8, "float", "channel")


def read(config: dict[str, Any]):
    found = read_quantisation(Fields("config.json", {"quantization_config": config}))
    assert found is not None
    return found


def mixed_folder(folder: Path, config: dict[str, Any], **forms: str) -> Checkpoint:
    """A tiny Llama whose modules of these names are in these formats; the rest are floats."""
    plain, _ = make_tiny("llama", folder / "plain")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        form = forms.get(name.split(".")[-2])
        if form is None or not is_packed(name, tensor):
            stored[name] = tensor
            continue
        packed = FORMATS[form].pack(tensor)
        stored |= {name.removesuffix("weight") + part: value for part, value in packed.tensors.items()}
    whole = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    return load_checkpoint(write_folder(folder / "mixed", whole, stored))


def test_groups_of_two_formats_in_one_folder(tmp_path: Path) -> None:
    groups = {
        "a": {"targets": ["re:.*(gate|up)_proj$"], "weights": INT4, "format": "pack-quantized"},
        "b": {"targets": ["re:.*self_attn.*"], "weights": FP8, "format": "float-quantized"},
    }
    config = compressed("mixed-precision", INT4, config_groups=groups)
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "ct_fp8_channel")
    found = mixed_folder(tmp_path, config, gate_proj="ct_int4", up_proj="ct_int4", **attention)
    kinds = {name: found.tensors[f"layers.0.{name}"].kind.name for name in ("gate", "up", "q", "o", "down")}
    assert kinds == {"gate": "INT4", "up": "INT4", "q": "FP8", "o": "FP8", "down": "F32"}


@pytest.mark.parametrize(
    ("preset", "form", "bits", "layout", "named"),
    [
        ("W4A16", "pack-quantized", 4, Layout.PACKED_INTEGERS, "int4"),
        ("W8A8", "int-quantized", 8, Layout.PLAIN_INTEGERS, "int8"),
        ("FP8_DYNAMIC", "float-quantized", 8, Layout.FLOATS_OF_8, "fp8"),
        ("FP8_BLOCK", "float-quantized", 8, Layout.FLOATS_OF_8, "fp8"),
        ("NVFP4", "nvfp4-pack-quantized", 4, Layout.PACKED_FP4, "nvfp4"),
        ("MXFP4", "mxfp4-pack-quantized", 4, Layout.PACKED_FP4, "mxfp4"),
    ],
)
def test_presets(preset: str, form: str, bits: int, layout: Layout, named: str) -> None:
    found = read(compressed(form, INT4, config_groups={preset: ["Linear"]}))
    (scheme,) = found.schemes
    assert (scheme.bits, scheme.layout, found.format) == (bits, layout, named)


def test_gptq_overrides_by_pattern(tmp_path: Path) -> None:
    dynamic = {r"-:.*o_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": -1}}
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    found = mixed_folder(tmp_path, GPTQ | {"dynamic": dynamic}, down_proj="gptq_8", **dict.fromkeys(names, "gptq"))
    kinds = {name: found.tensors[f"layers.2.{name}"].kind.name for name in ("q", "o", "down")}
    assert kinds == {"q": "INT4", "o": "F32", "down": "INT8"}


def test_a_head_that_gptq_says_is_quantised(tmp_path: Path) -> None:
    plain, _ = make_tiny("llama", tmp_path / "plain")
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        packed = pack_gptq()(tensor).tensors if is_packed(name, tensor) or name == "lm_head.weight" else None
        parts = {name: tensor} if packed is None else {name.removesuffix("weight") + p: v for p, v in packed.items()}
        stored |= parts
    config = json.loads((plain / "config.json").read_text())
    said = write_folder(tmp_path / "a", config | {"quantization_config": GPTQ | {"lm_head": True}}, stored)
    assert load_checkpoint(said).tensors["output"].kind.name == "INT4"
    with pytest.raises(ModelError, match=r"'lm_head.weight' is stored quantised, and .* says that it is not"):
        load_checkpoint(write_folder(tmp_path / "b", config | {"quantization_config": GPTQ}, stored))


def test_modelopt_by_module() -> None:
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}, "model.x": {"quant_algo": "FP8"}}
    found = read({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    scheme, expected = found.scheme_of(("model.layers.0.mlp.up_proj",), Role.LINEAR)
    assert scheme is not None and scheme.layout is Layout.MODELOPT_FP4 and expected is Expected.YES
    assert found.scheme_of(("model.layers.1.mlp.up_proj",), Role.LINEAR) == (None, Expected.NO)


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)])
def test_scales_of_kv_are_kept(names: tuple[str, ...], tmp_path: Path) -> None:
    scheme = arguments(8, "float", "tensor")
    config = compressed("pack-quantized", INT4, kv_cache_scheme=scheme, config_groups={"W4A16": ["re:nothing"]})
    plain, _ = make_tiny("llama", tmp_path / "plain")
    stored = load_file(plain / "model.safetensors")
    for layer in range(3):
        for index, name in enumerate(names):
            stored[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor([0.5 + layer + index / 4])
    whole = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    found = load_checkpoint(write_folder(tmp_path / "kv", whole, stored))
    assert found.quantisation is not None and found.quantisation.kv == KVScheme("fp8")
    assert found.kv_scales is not None
    np.testing.assert_array_equal([found.kv_scales.keys[layer][0] for layer in range(3)], [0.5, 1.5, 2.5])
    last = 0.25 if len(names) == 2 else 0.0
    np.testing.assert_array_equal([found.kv_scales.values[layer][0] for layer in range(3)], np.arange(3) + 0.5 + last)
    for name, value, sentence in (
        (f"model.layers.1.self_attn.{names[0]}", -1.0, "must be positive"),
        (f"model.layers.1.self_attn.{names[0]}", float("nan"), "must be positive"),
        (f"model.layers.7.self_attn.{names[0]}", None, "same layers"),
        (f"model.{names[0]}", 1.0, "is no scale of a layer's keys or values"),
    ):
        if value is None and len(names) == 1:
            continue
        spoilt = stored | {name: torch.tensor([1.0 if value is None else value])}
        with pytest.raises(ModelError, match=sentence):
            load_checkpoint(write_folder(tmp_path / "spoilt", whole, spoilt))
