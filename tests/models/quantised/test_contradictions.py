"""What a quantised folder says in two places must agree: its config, its names, its shapes and its numbers. Where they
do not, there is one sentence that names file and field, and never a weight that is silently something else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.quantised.folders import (
    ALL_FORMATS,
    AWQ,
    FORMATS,
    GPTQ,
    INT4,
    MODELOPT,
    Tensors,
    arguments,
    compressed,
    make_quantised,
)
from tests.models.quantised.published import PUBLISHERS, publish
from tests.models.tiny_checkpoints import make_tiny

from twostroke.core.errors import ModelError
from twostroke.models.loading import load_checkpoint

Q = "model.layers.1.self_attn.q_proj."


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def reconfigure(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_part(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({Q + part: change(tensors[Q + part])})


TENSORS: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("ct_int4", lambda t: t.pop(Q + "weight_scale"), "weight_scale is missing"),
    ("ct_int4", lambda t: t.pop(Q + "weight_packed"), "weight_packed is missing"),
    ("ct_int4", lambda t: t.pop(Q + "weight_shape"), "weight_shape is missing"),
    ("ct_int4", change_part("weight_shape", lambda w: w * 2), "weight_shape of"),
    ("ct_int4", change_part("weight_shape", lambda w: w - 2**40), "weight_shape of"),
    ("ct_int4", change_part("weight_packed", lambda w: w[:, :-1]), "weight_packed of shape"),
    ("ct_int4", change_part("weight_packed", lambda w: w.to(torch.int64)), "weight_packed of I64, and I32 is asked"),
    ("ct_int4", change_part("weight_scale", lambda w: w[:, :1]), "weight_scale of shape"),
    ("ct_int4", change_part("weight_scale", lambda w: w.to(torch.int32)), "weight_scale of I32"),
    ("ct_int4", change_part("weight_scale", lambda w: w.T), "weight_scale of shape"),
    ("ct_int4", lambda t: t.update({Q + "weight_zero_point": torch.zeros(8, 2, dtype=torch.int32)}), "is symmetric"),
    ("ct_int4", lambda t: t.update({Q + "weight_g_idx": torch.arange(64, dtype=torch.int32) % 2}), "have no order"),
    ("ct_int4", lambda t: t.update({Q + "weight_global_scale": torch.ones(1)}), "has a weight_global_scale, which"),
    ("ct_int4", lambda t: t.update({Q + "qweight": torch.ones(1, 1)}), "has a qweight, which"),
    ("ct_int4", lambda t: t.update({"model.layers.9.mlp.up_proj.weight_packed": torch.ones(1, 1)}), "layers.9"),
    ("ct_int4", lambda t: t.update({"model.norm.weight_scale": torch.ones(1)}), "'model.norm.weight'"),
    ("ct_int4_asym", lambda t: t.pop(Q + "weight_zero_point"), "has no zero points"),
    ("ct_int4_asym", change_part("weight_zero_point", lambda w: w[1:]), "weight_zero_point of shape"),
    ("ct_int4_order", lambda t: t.pop(Q + "weight_g_idx"), "has no weight_g_idx"),
    ("ct_int4_order", change_part("weight_g_idx", lambda w: w + 1), "beyond its 2"),
    ("ct_int4_order", change_part("weight_g_idx", lambda w: w - 1), "beyond its 2"),
    ("ct_int4_order", change_part("weight_g_idx", lambda w: w[1:]), "weight_g_idx of shape"),
    ("ct_nvfp4", lambda t: t.pop(Q + "weight_global_scale"), "weight_global_scale is missing"),
    ("ct_nvfp4", change_part("weight_global_scale", lambda w: w * 0), "a positive number is asked for"),
    ("ct_nvfp4", change_part("weight_global_scale", lambda w: w * float("nan")), "a positive number is asked for"),
    ("ct_nvfp4", change_part("weight_scale", lambda w: w.float()), "weight_scale of F32"),
    ("ct_mxfp4", change_part("weight_packed", lambda w: w[:, :-8]), "no whole groups of 32"),
    ("fp8_tensor", change_part("weight_scale", lambda w: w.repeat(3)), "one number for the whole tensor is asked for"),
    ("fp8_tensor", lambda t: t.pop(Q + "weight_scale"), "weight_scale is missing"),
    ("fp8_tensor", change_part("weight", lambda w: w.view(torch.int8)), "weight of I8, and F8_E4M3 is asked for"),
    ("fp8_static", change_part("input_scale", lambda w: -w), "a positive number is asked for"),
    ("fp8_block", change_part("weight_scale_inv", lambda w: w[:1]), "weight_scale_inv of shape (1, 2), and (2, 2)"),
    ("fp8_block", lambda t: t.update({Q + "weight_scale": torch.ones(1)}), "both a weight_scale and"),
    ("gptq", lambda t: t.pop(Q + "scales"), "scales is missing"),
    ("gptq", change_part("scales", lambda w: w.T), "scales of shape"),
    ("gptq", change_part("qzeros", lambda w: w + 1), "zero points that are not the middle"),
    ("gptq", change_part("qzeros", lambda w: w[:, :1]), "qzeros of shape"),
    ("gptq", change_part("g_idx", lambda w: w.flip(0)), "g_idx that orders inputs"),
    ("gptq_order", change_part("g_idx", lambda w: w * 1000), "beyond its 2"),
    ("awq", change_part("qweight", lambda w: w[:-1]), "and an even number is asked for"),
    ("modelopt_nvfp4", lambda t: t.pop(Q + "weight_scale_2"), "weight_scale_2 is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "change", "sentence"), TENSORS, ids=[f"{i}-{t[0]}" for i, t in enumerate(TENSORS)])
def test_tensors_that_do_not_go_together(
    form: str, change: Callable[[Tensors], object], sentence: str, tmp_path: Path
) -> None:
    folder = rewrite(make_quantised(form, tmp_path)[0], change)
    found = refusal(folder)
    assert sentence in found and str(folder) in found


def test_a_float_where_the_config_says_quantised(tmp_path: Path) -> None:
    """As a file that was put together wrongly, or an ignore list that lost an entry, would have it."""
    for form in FORMATS:
        folder, meant = make_quantised(form, tmp_path / form)
        plain = load_file(meant / "model.safetensors")[Q + "weight"]
        parts = FORMATS[form].pack(plain).tensors

        def as_float(tensors: Tensors, parts: Tensors = parts, plain: torch.Tensor = plain) -> None:
            for part in parts:
                del tensors[Q + part]
            tensors[Q + "weight"] = plain.to(torch.bfloat16)

        found = refusal(rewrite(folder, as_float))
        assert "q_proj.weight' is stored as BF16, and" in found and "says it is quantised" in found, form


@pytest.mark.parametrize("form", ALL_FORMATS)
def test_a_quantised_matrix_where_the_config_says_float(form: str, tmp_path: Path) -> None:
    folder, _ = make_quantised(form, tmp_path)
    file = folder / ALL_FORMATS[form].file
    config = json.loads(file.read_text())
    sections = (config[name] for name in (ALL_FORMATS[form].section, "quantization") if name in config)
    own = next(sections, config)
    names = ["ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"]
    listed = next((name for name in names if name in own), "modules_to_not_convert")
    own[listed] = [*own.get(listed, []), Q.rstrip(".")]
    file.write_text(json.dumps(config))
    found = refusal(folder)
    assert "q_proj.weight' is stored quantised, and" in found and "says that it is not" in found


def test_no_config_and_quantised_tensors(tmp_path: Path) -> None:
    for form in ("ct_int4", "fp8_tensor", "gptq", "ct_nvfp4", "ct_int8"):
        folder, _ = make_quantised(form, tmp_path / form)
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
        assert "which is not read; these are: F32, F16, BF16" in refusal(folder)


def test_a_substring_of_a_name_ignores_nothing(tmp_path: Path) -> None:
    folder = reconfigure(make_quantised("ct_int4", tmp_path)[0], ignore=["lm_head", "q_proj", "layers.1"])
    load_checkpoint(folder)  # neither is a module's whole name
    folder = reconfigure(folder, ignore=["lm_head", f"re:.*{Q.rstrip('.')}$"])
    assert "says that it is not" in refusal(folder)


FP4_GROUP = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
FP8_ROWS = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "channel"}
CONFIGS: list[tuple[dict[str, Any], str]] = [
    (compressed("marlin-24", INT4), "format is 'marlin-24', which is not read; these are: pack-quantized"),
    (compressed("pack-quantized", INT4 | {"num_bits": 3}), "weights of 3 bits (int) are not read in it"),
    (compressed("pack-quantized", INT4 | {"type": "float"}), "weights of 4 bits (float) are not read in it"),
    (compressed("pack-quantized", INT4 | {"strategy": "row"}), "strategy is 'row', which is not understood here"),
    (compressed("pack-quantized", INT4 | {"group_size": 0}), "group_size must be an integer from 1"),
    (compressed("pack-quantized", INT4 | {"group_size": None}), "group_size is missing"),
    (compressed("pack-quantized", INT4 | {"dynamic": True}), "dynamic is set, and weights are stored with their"),
    (compressed("pack-quantized", INT4 | {"rotation": "hadamard"}), "rotation is 'hadamard', and this setting is not"),
    (compressed("pack-quantized", INT4 | {"actorder": "random"}), "actorder is 'random'"),
    (compressed("pack-quantized", INT4, transform_config={"config_groups": {"R1": {}}}), "transform_config asks for"),
    (compressed("pack-quantized", INT4, sparsity_config={"format": "sparse-24"}), "sparsity_config asks for"),
    (compressed("pack-quantized", INT4, quantization_status="calibration"), "quantization_status is 'calibration'"),
    (compressed("pack-quantized", INT4, config_groups={}), "config_groups must name a group"),
    (compressed("pack-quantized", INT4, config_groups={"W9A9": ["Linear"]}), "W9A9 is no scheme that is known here"),
    (compressed("pack-quantized", INT4, config_groups={"g": 7}), "g must be an object"),
    (compressed("pack-quantized", INT4, ignore=["re:(?=x)"]), "ignore holds a pattern that has a part of the kind"),
    (compressed("pack-quantized", INT4, ignore="lm_head"), "ignore must be a list of strings"),
    (compressed("pack-quantized", INT4, kv_cache_scheme={"num_bits": 4}), "num_bits is 4, and KV is kept in 8"),
    (compressed("pack-quantized", INT4, kv_cache_scheme=arguments(8, "float", "channel")), "strategy is 'channel'"),
    (compressed("float-quantized", arguments(8, "float", "block")), "block_structure is missing"),
    (compressed("float-quantized", arguments(8, "float", "block", block_structure=[0, 1])), "must be two sizes"),
    (compressed("float-quantized", arguments(8, "float", "tensor") | {"symmetric": False}), "symmetric is false"),
    (compressed("nvfp4-pack-quantized", arguments(4, "float", "group", group_size=64)), "must be 16 (NVFP4) or 32"),
    (GPTQ | {"bits": 3}, "bits is 3, which is not read; 4 and 8 are"),
    (GPTQ | {"bits": "4"}, "bits must be an integer"),
    (GPTQ | {"group_size": 0}, "group_size must be -1"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', which is not understood here"),
    (GPTQ | {"dynamic": {"+:(": {}}}, "holds a pattern that is not a regular expression"),
    (GPTQ | {"dynamic": {"+:.*q_proj": {"bits": 5}}}, "bits is 5, which is not read"),
    (GPTQ | {"surprise": 1}, "surprise is 1, and this setting is not understood here"),
    (AWQ | {"version": "gemv"}, "version is 'gemv', which is not understood here; these are: gemm"),
    (AWQ | {"bits": 8}, "bits is 8, which is not read of AWQ"),
    (AWQ | {"zero_point": False}, "zero_point is false"),
    ({"quant_method": "fp8", "activation_scheme": "guessed"}, "activation_scheme is 'guessed'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2', which is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two sizes"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ', which is not read"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "NVFP4 has groups of 16"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers must name the modules"),
    (MODELOPT | {"quant_algo": "FP8", "config_groups": {"g": {"weights": FP4_GROUP}}},
     "g has weights in another form than quant_algo, which is 'FP8'"),
    (MODELOPT | {"quant_algo": "NVFP4", "config_groups": {"g": {"weights": FP4_GROUP | {"group_size": 32}}}},
     "g has weights in another form than quant_algo, which is 'NVFP4'"),
    (MODELOPT | {"quant_algo": "NVFP4", "config_groups": {"g": {"weights": FP4_GROUP | {"type": "int"}}}},
     "g has weights in another form than quant_algo"),
    (MODELOPT | {"quant_algo": "FP8", "config_groups": {"g": {"weights": FP8_ROWS}}},
     "g has weights in another form than quant_algo"),
    (MODELOPT | {"quant_algo": "FP8", "config_groups": {"good": {"weights": {"num_bits": 8}}, "g": 7}},
     "g must be an object"),
    (MODELOPT | {"quant_algo": "FP8", "config_groups": [1]}, "config_groups must be an object"),
    (MODELOPT | {"quant_algo": "FP8", "config_groups": {"g": {"weights": 4}}}, "weights must be an object"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method is 'bitsandbytes', which is not supported"),
    ({"bits": 4}, "quant_method is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "sentence"), CONFIGS, ids=[sentence[:30] for _, sentence in CONFIGS])
def test_configs_that_are_not_understood(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder, _ = make_quantised("ct_int4", tmp_path)
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    found = refusal(folder)
    assert sentence in found and found.startswith("config.json: quantization_config")


@pytest.mark.parametrize("section", [5, None, [], "int4"])
def test_a_file_beside_the_config_that_is_no_object(section: object, tmp_path: Path) -> None:
    folder, _ = make_tiny("llama", tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    assert "hf_quant_config.json" in refusal(folder)


@pytest.mark.parametrize("name", ["fp8_block", "modelopt_nvfp4"])
def test_stacked_experts_that_should_be_quantised_are_no_floats(name: str, tmp_path: Path) -> None:
    """Where the config speaks of all matrices. Where it speaks of a class, stacks are none of it: a start tells."""
    plain = make_tiny("gpt_oss", tmp_path / "plain")[0]
    left = replace(PUBLISHERS[name], experts="left")
    folder, _ = publish(plain, tmp_path / "left", left)
    assert re.search(r"experts\.(gate_up|down)_proj.* is stored as .*says it is quantised", refusal(folder))
    field = "exclude_modules" if name.startswith("modelopt") else "modules_to_not_convert"
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    reconfigure(folder, **{field: [*config[field], "*.mlp.experts*"]})
    assert not load_checkpoint(folder).tensors["layers.0.experts.0.gate"].kind.is_quantised
