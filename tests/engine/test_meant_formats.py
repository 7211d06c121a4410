"""What a quantised folder means and an engine does otherwise is told when the engine starts, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.quantised.folders import arguments, make_quantised
from tests.models.quantised.published import PUBLISHERS, publish
from tests.models.tiny_checkpoints import make_tiny

from twostroke import machine
from twostroke.backends.cpu import FACTORY
from twostroke.config import EngineConfig, KVConfig
from twostroke.engine.formats import choose_formats
from twostroke.models.loading import load_checkpoint

OF_KV = "the file means KV in fp8"
OF_INPUTS = "scales that the file has for inputs of matrices are not used"


def told(folder: Path, kv: str = "auto") -> str:
    config = EngineConfig(backend="cpu", kv=KVConfig(kind=kv))
    return choose_formats(config, load_checkpoint(folder), machine.detect(), FACTORY, "asked for").formats.line


def with_kv_scheme(folder: Path) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = arguments(8, "float", "tensor")
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("form", "has_kv", "found"),
    [
        ("ct_fp8_tensor", True, {OF_KV, OF_INPUTS}),
        ("ct_fp8_channel", True, {OF_KV}),
        ("fp8_static", False, {OF_INPUTS}),
        ("modelopt_fp8", False, {OF_INPUTS}),
        ("fp8_block", False, set()),
        ("awq", False, set()),
    ],
)
def test_what_is_not_as_the_file_means_it(form: str, has_kv: bool, found: set[str], tmp_path: Path) -> None:
    folder = make_quantised(form, tmp_path)[0]
    line = told(with_kv_scheme(folder) if has_kv else folder)
    assert {one for one in (OF_KV, OF_INPUTS) if one in line} == found


def test_kv_of_a_byte_says_whose_scales_it_has(tmp_path: Path) -> None:
    line = told(with_kv_scheme(make_quantised("ct_fp8_channel", tmp_path)[0]), kv="int8")
    assert OF_KV not in line and "KV in int8 with a scale for each token and head" in line


@pytest.mark.parametrize(
    ("form", "kind"),
    [("ct_w4a8", "fp8"), ("fp8_block", "fp8"), ("ct_int8", None), ("ct_int4", None)],
)
def test_inputs_that_a_file_means_in_fewer_bits_are_told(form: str, kind: str | None, tmp_path: Path) -> None:
    """W4A8 among them: numbers of four bits, for inputs in float8. The CPU multiplies int8 as the file means it."""
    name = "ct_int4" if form == "ct_w4a8" else form
    folder = make_quantised(name, tmp_path)[0]
    if form == "ct_w4a8":
        path = folder / "config.json"
        config = json.loads(path.read_text())
        (group,) = config["quantization_config"]["config_groups"].values()
        group["input_activations"] = arguments(8, "float", "token", dynamic=True)
        path.write_text(json.dumps(config))
    line = told(folder)
    assert ("the file means inputs of matrices in" in line) == (kind is not None)
    assert kind is None or f"the file means inputs of matrices in {kind}, which stay in int8" in line


def test_experts_that_a_tool_left_as_floats_are_told(tmp_path: Path) -> None:
    """Of a class that stacks are none of."""
    plain = make_tiny("gpt_oss", tmp_path / "plain")[0]
    for name, is_left in (("ct_fp8_channel", True), ("ct_mxfp4_stacks", False)):
        folder, _ = publish(plain, tmp_path / name, PUBLISHERS[name])
        assert ("experts are stored in F32, of which" in told(folder)) == is_left


@pytest.mark.parametrize("name", ["ct_fp8_channel", "awq"])
@pytest.mark.parametrize("matrices", [("",), (".gate_up_proj", ".down_proj")])
def test_experts_that_the_config_leaves_by_name_are_not(name: str, matrices: tuple[str, ...], tmp_path: Path) -> None:
    folder, _ = publish(make_tiny("gpt_oss", tmp_path / "plain")[0], tmp_path / name, PUBLISHERS[name])
    path = folder / "config.json"
    config = json.loads(path.read_text())
    settings = config["quantization_config"]
    field = "ignore" if name.startswith("ct") else "modules_to_not_convert"
    named = settings[field]
    stacks = [f"model.layers.{layer}.mlp.experts" for layer in range(config["num_hidden_layers"])]
    for entries, is_told in ((stacks[:-1], True), (stacks, False)):
        settings[field] = [*named, *(f"{stack}{matrix}" for stack in entries for matrix in matrices)]
        path.write_text(json.dumps(config))
        assert ("experts are stored in" in told(folder)) == is_told


def test_experts_in_floats_of_two_kinds_are_told_in_order(tmp_path: Path) -> None:
    folder, _ = publish(make_tiny("gpt_oss", tmp_path / "plain")[0], tmp_path / "m", PUBLISHERS["ct_fp8_channel"])
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("experts.down_proj"):
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    assert "experts are stored in BF16 and F32, of which" in told(folder)
