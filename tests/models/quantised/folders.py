"""Tiny checkpoints in every quantised format, written from a float one: packed here in plain torch, after each
format's own description, and never with the code under test. Beside each goes the float checkpoint it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny_checkpoints import make_tiny
from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Packed:
    """One matrix: the tensors that a folder has for it, and the floats that they stand for."""

    tensors: Tensors
    meant: torch.Tensor


@dataclass
class Format:
    pack: Callable[[torch.Tensor], Packed]
    config: dict[str, Any]
    kind: str
    """Of WeightKind."""
    file: str = "config.json"
    section: str = "quantization_config"
    """Of config.json."""


def words_of(codes: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[n, numbers] to [n, words] of 32 bits: number i of a word at place i, or where `places` has it."""
    each = 32 // bits
    shifts = torch.tensor(places or tuple(range(each))) * bits
    padded = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[1] % each))
    words = (padded.reshape(len(codes), -1, each) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def integers(
    weight: torch.Tensor, bits: int, group: int, symmetric: bool, order: torch.Tensor | None, kind: torch.dtype
):
    """Codes [rows, inputs], scales and zeros [rows, groups], and what they stand for in float32."""
    rows, inputs = weight.shape
    groups = -(-inputs // group)
    owner = torch.arange(inputs) // group if order is None else order
    scales, zeros, codes = torch.empty(rows, groups), torch.empty(rows, groups), torch.empty(rows, inputs)
    most = 2**bits - 1
    for index in range(groups):
        part = weight[:, owner == index]
        if symmetric:
            scale, zero = part.abs().amax(1) / (2 ** (bits - 1) - 1), torch.full((rows,), 2.0 ** (bits - 1))
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (high - low) / most
            zero = (-low / scale).round().clamp(1, most)
        scale = scale.to(kind).float()
        scales[:, index], zeros[:, index] = scale, zero
        codes[:, owner == index] = (part / scale[:, None] + zero[:, None]).round().clamp(0, most)
    meant = (codes - zeros[:, owner]) * scales[:, owner]
    return codes, scales.to(kind), zeros, meant


def shuffled_groups(inputs: int, group: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(inputs)
    return (torch.arange(inputs) // group)[torch.randperm(inputs, generator=generator)].to(torch.int32)


def pack_compressed(bits=4, group=32, symmetric=True, ordered=False, kind=torch.bfloat16):
    def pack(weight: torch.Tensor) -> Packed:
        size = weight.shape[1] if group is None else group
        order = shuffled_groups(weight.shape[1], size) if ordered else None
        codes, scales, zeros, meant = integers(weight, bits, size, symmetric, order, kind)
        tensors = {
            "weight_packed": words_of(codes, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words_of(zeros.T.contiguous(), bits).T.contiguous()
        if order is not None:
            tensors["weight_g_idx"] = order
        return Packed(tensors, meant)

    return pack


def pack_bytes(symmetric=True):
    def pack(weight: torch.Tensor) -> Packed:
        codes, scales, zeros, meant = integers(weight, 8, weight.shape[1], symmetric, None, torch.float32)
        tensors = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return Packed(tensors, meant)

    return pack


def pack_gptq(bits=4, group=32, symmetric=True, ordered=False, less_one=True):
    def pack(weight: torch.Tensor) -> Packed:
        size = weight.shape[1] if group == -1 else group
        order = shuffled_groups(weight.shape[1], size) if ordered else None
        codes, scales, zeros, meant = integers(weight, bits, size, symmetric, order, torch.float16)
        plain = torch.arange(weight.shape[1], dtype=torch.int32) // size
        tensors = {
            "qweight": words_of(codes, bits).T.contiguous(),
            "qzeros": words_of(zeros.T - int(less_one), bits),
            "scales": scales.T.contiguous(),
            "g_idx": plain if order is None else order,
        }
        return Packed(tensors, meant)

    return pack


def pack_awq(weight: torch.Tensor) -> Packed:
    codes, scales, zeros, meant = integers(weight, 4, 32, False, None, torch.float16)
    tensors = {
        "qweight": words_of(codes.T.contiguous(), 4, AWQ_PLACES),
        "qzeros": words_of(zeros.T.contiguous(), 4, AWQ_PLACES),
        "scales": scales.T.contiguous(),
    }
    return Packed(tensors, meant)


def pack_fp8(strategy="tensor", block=(32, 32), scale_name="weight_scale", static=False, shape=None):
    def pack(weight: torch.Tensor) -> Packed:
        rows, inputs = weight.shape
        high, wide = {"tensor": (rows, inputs), "channel": (1, inputs), "block": block}[strategy]
        blocks = torch.nn.functional.pad(weight, (0, -inputs % wide, 0, -rows % high))
        blocks = blocks.reshape(blocks.shape[0] // high, high, blocks.shape[1] // wide, wide)
        scales = blocks.abs().amax((1, 3)) / 448
        whole = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :inputs]
        codes = (weight / whole).to(torch.float8_e4m3fn)
        stored = scales.reshape(()) if strategy == "tensor" and shape is None else scales
        tensors = {"weight": codes, scale_name: stored if shape is None else scales.reshape(shape)}
        if static:
            tensors["input_scale"] = torch.tensor(0.125)
        return Packed(tensors, codes.float() * whole)

    return pack


def fp4_codes(values: torch.Tensor) -> torch.Tensor:
    return (values[..., None] - FP4).abs().argmin(-1).to(torch.uint8)


def pairs(codes: torch.Tensor) -> torch.Tensor:
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def pack_nvfp4(modelopt=False):
    def pack(weight: torch.Tensor) -> Packed:
        groups = weight.reshape(len(weight), -1, 16)
        whole = 448 * 6 / weight.abs().max()
        scales = (groups.abs().amax(2) / 6 * whole).to(torch.float8_e4m3fn)
        factor = 1 / whole
        effective = scales.float() * factor if modelopt else scales.float() / whole
        codes = fp4_codes(groups / effective[..., None])
        meant = (FP4[codes.long()] * effective[..., None]).reshape(weight.shape)
        packed = pairs(codes.reshape(weight.shape))
        if modelopt:
            return Packed({"weight": packed, "weight_scale": scales, "weight_scale_2": factor.reshape(())}, meant)
        return Packed({"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole.reshape(1)}, meant)

    return pack


def mx_parts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed codes [rows, inputs / 2], exponents [rows, inputs / 32], and what they stand for."""
    groups = weight.reshape(len(weight), -1, 32)
    powers = torch.floor(torch.log2(groups.abs().amax(2).clamp(min=1e-30))) - 2
    scales = torch.exp2(powers)
    codes = fp4_codes(groups / scales[..., None])
    meant = (FP4[codes.long()] * scales[..., None]).reshape(weight.shape)
    return pairs(codes.reshape(weight.shape)), (powers + 127).to(torch.uint8), meant


def pack_mxfp4(weight: torch.Tensor) -> Packed:
    packed, exponents, meant = mx_parts(weight)
    return Packed({"weight_packed": packed, "weight_scale": exponents}, meant)


def pack_mxfp8(weight: torch.Tensor) -> Packed:
    groups = weight.reshape(len(weight), -1, 32)
    powers = torch.floor(torch.log2(groups.abs().amax(2).clamp(min=1e-30))) - 8
    scales = torch.exp2(powers)[..., None]
    codes = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": codes.reshape(weight.shape), "weight_scale": (powers + 127).to(torch.uint8)}
    return Packed(tensors, (codes.float() * scales).reshape(weight.shape))


def compressed(format_name: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        **more,
    }


def arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}


INT4 = arguments(4, "int", "group", group_size=32)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
MODELOPT = {"quant_method": "modelopt", "exclude_modules": ["lm_head", "model.layers.*.mlp.gate"]}
TOKENS_FP8 = arguments(8, "float", "token", dynamic=True)

FORMATS: dict[str, Format] = {
    "ct_int4": Format(pack_compressed(), compressed("pack-quantized", INT4), "INT4"),
    "ct_int4_asym": Format(
        pack_compressed(symmetric=False), compressed("pack-quantized", INT4 | {"symmetric": False}), "INT4"
    ),
    "ct_int4_order": Format(
        pack_compressed(ordered=True), compressed("pack-quantized", INT4 | {"actorder": "group"}), "INT4"
    ),
    "ct_int4_channel": Format(
        pack_compressed(group=None, kind=torch.float16),
        compressed("pack-quantized", arguments(4, "int", "channel")),
        "INT4",
    ),
    "ct_int8_packed": Format(
        pack_compressed(bits=8), compressed("pack-quantized", arguments(8, "int", "group", group_size=32)), "INT8"
    ),
    "ct_int8": Format(
        pack_bytes(),
        compressed("int-quantized", arguments(8, "int", "channel"), arguments(8, "int", "token", dynamic=True)),
        "INT8",
    ),
    "ct_int8_asym": Format(
        pack_bytes(symmetric=False),
        compressed("int-quantized", arguments(8, "int", "channel") | {"symmetric": False}),
        "INT8",
    ),
    "ct_fp8_tensor": Format(
        pack_fp8(static=True, shape=(1,)),
        compressed("float-quantized", arguments(8, "float", "tensor"), arguments(8, "float", "tensor")),
        "FP8",
    ),
    "ct_fp8_channel": Format(
        pack_fp8("channel"), compressed("float-quantized", arguments(8, "float", "channel"), TOKENS_FP8), "FP8"
    ),
    "ct_fp8_block": Format(
        pack_fp8("block"),
        compressed("float-quantized", arguments(8, "float", "block", block_structure=[32, 32])),
        "FP8",
    ),
    "ct_nvfp4": Format(
        pack_nvfp4(),
        compressed("nvfp4-pack-quantized", arguments(4, "float", "tensor_group", group_size=16)),
        "NVFP4_PARTS",
    ),
    "ct_mxfp4": Format(
        pack_mxfp4, compressed("mxfp4-pack-quantized", arguments(4, "float", "group", group_size=32)), "MXFP4_PARTS"
    ),
    "fp8_tensor": Format(pack_fp8(), FP8, "FP8"),
    "fp8_static": Format(
        pack_fp8(static=True), FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}, "FP8"
    ),
    "fp8_block": Format(pack_fp8("block", scale_name="weight_scale_inv"), FP8 | {"weight_block_size": [32, 32]}, "FP8"),
    "fp8_ragged_block": Format(
        pack_fp8("block", block=(48, 40), scale_name="weight_scale_inv"), FP8 | {"weight_block_size": [48, 40]}, "FP8"
    ),
    "fbgemm": Format(pack_fp8("channel"), {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, "FP8"),
    "gptq": Format(pack_gptq(), GPTQ, "INT4"),
    "gptq_8": Format(pack_gptq(bits=8, group=-1), GPTQ | {"bits": 8, "group_size": -1}, "INT8"),
    "gptq_asym": Format(pack_gptq(symmetric=False), GPTQ | {"sym": False}, "INT4"),
    "gptq_order": Format(pack_gptq(ordered=True), GPTQ | {"desc_act": True}, "INT4"),
    "gptq_v2": Format(
        pack_gptq(symmetric=False, less_one=False), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "INT4"
    ),
    "gptq_file": Format(
        pack_gptq(), {k: v for k, v in GPTQ.items() if k != "quant_method"}, "INT4", "quantize_config.json"
    ),
    "awq": Format(pack_awq, AWQ, "INT4"),
    "modelopt_nvfp4": Format(pack_nvfp4(modelopt=True), MODELOPT | {"quant_algo": "NVFP4"}, "NVFP4_PARTS"),
    "modelopt_fp8": Format(
        pack_fp8(static=True),
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*mlp.gate"]}},
        "FP8",
        "hf_quant_config.json",
    ),
}

_LAYERS = [f"model.layers.{layer}" for layer in range(3)]
_MODULES = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
_MXFP8 = arguments(8, "float", "group", group_size=32)
FURTHER: dict[str, Format] = {
    "ct_mxfp8": Format(pack_mxfp8, compressed("mxfp8-quantized", _MXFP8), "FP8"),
    "ct_mxfp8_preset": Format(
        pack_mxfp8, compressed("mxfp8-quantized", {}, config_groups={"MXFP8": ["Linear"]}), "FP8"
    ),
    "ct_mxfp8a16_preset": Format(
        pack_mxfp8, compressed("mxfp8-quantized", {}, config_groups={"MXFP8A16": ["Linear"]}), "FP8"
    ),
    "modelopt_fp8_blocks": Format(pack_fp8("block", (128, 128)), MODELOPT | {"quant_algo": "FP8_PB_WO"}, "FP8"),
    "modelopt_fp8_channels": Format(pack_fp8("channel"), MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "FP8"),
    "modelopt_w4a16": Format(pack_nvfp4(modelopt=True), MODELOPT | {"quant_algo": "W4A16_NVFP4"}, "NVFP4_PARTS"),
    "modelopt_mixed": Format(
        pack_fp8(static=True),
        MODELOPT
        | {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {f"{layer}.{name}": {"quant_algo": "FP8"} for layer in _LAYERS for name in _MODULES},
        },
        "FP8",
    ),
    "modelopt_groups": Format(
        pack_nvfp4(modelopt=True),
        MODELOPT
        | {
            "quant_algo": "NVFP4",
            "config_groups": {
                "group_0": {
                    "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                    "targets": ["Linear"],
                }
            },
        },
        "NVFP4_PARTS",
    ),
    "awq_file": Format(
        pack_awq, {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "INT4", "quant_config.json"
    ),
    "ct_compression": Format(
        pack_compressed(),
        {name: value for name, value in compressed("pack-quantized", INT4).items() if name != "quant_method"},
        "INT4",
        section="compression_config",
    ),
}
"""Read as well, and by the same code as one of those above."""
ALL_FORMATS = FORMATS | FURTHER


def is_packed(name: str, tensor: torch.Tensor) -> bool:
    """Whether the usual lists of what stays as it is have this tensor quantised."""
    kept = ("lm_head", "embed_tokens", "mlp.gate.weight", "block_sparse_moe.gate.weight")
    return tensor.ndim == 2 and name.endswith(".weight") and not any(word in name for word in kept)


def quantise_folder(folder: Path, target: Path, form: Format) -> tuple[Path, Path]:
    """The folder's model in a format, and beside it in floats: (quantised, meant)."""
    quantised, meant = target / "quantised", target / "meant"
    stored: Tensors = {}
    floats: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not is_packed(name, tensor):
            stored[name] = floats[name] = tensor
            continue
        packed = form.pack(tensor.float())
        floats[name] = packed.meant.contiguous()
        stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in packed.tensors.items()}
    config = json.loads((folder / "config.json").read_text())
    write_folder(meant, config, floats)
    if form.file == "config.json":
        config = config | {form.section: form.config}
    write_folder(quantised, config, stored)
    if form.file != "config.json":
        (quantised / form.file).write_text(json.dumps(form.config))
    return quantised, meant


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def make_quantised(form: str, target: Path, variant: str = "llama") -> tuple[Path, Path]:
    return quantise_folder(make_tiny(variant, target / "plain")[0], target, ALL_FORMATS[form])


def make_native_mxfp4(target: Path) -> tuple[Path, PreTrainedModel]:
    """gpt-oss as its makers store it, and the model with what that stands for: experts' blocks hold outputs first,
    gates and ups in turn."""
    folder, model = make_tiny("gpt_oss", target / "plain")
    stored, meant = {}, model.state_dict()
    for name, tensor in model.state_dict().items():
        stored[name] = tensor.contiguous()
        if tensor.ndim == 3:
            parts = [mx_parts(expert.T.contiguous()) for expert in tensor]
            meant[name] = torch.stack([floats for _, _, floats in parts]).transpose(1, 2).contiguous()
            del stored[name]
            blocks = torch.stack([packed for packed, _, _ in parts])
            stored[f"{name}_blocks"] = blocks.reshape(len(parts), tensor.shape[2], -1, 16)
            stored[f"{name}_scales"] = torch.stack([scales for _, scales, _ in parts])
    model.load_state_dict(meant)
    config = json.loads((folder / "config.json").read_text())
    unquantised = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": unquantised}
    return write_folder(target / "found", config | {"quantization_config": mxfp4}, stored), model
