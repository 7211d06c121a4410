"""Writes `recorded.safetensors`: small matrices as compressed-tensors, AutoGPTQ and AutoAWQ pack them, and the floats
that these packages themselves make of them. They are no part of the development extras, so their word is kept.

    python tests/models/quantised/record.py AUTO_GPTQ_FOLDER AUTO_AWQ_FOLDER

in an environment with torch and compressed-tensors, and with the sources of auto_gptq and autoawq in two folders."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ROWS, INPUTS, GROUP = 32, 64, 32
TARGET = Path(__file__).with_name("recorded.safetensors")


def main() -> None:
    gptq_folder, awq_folder = map(Path, sys.argv[1:3])
    torch.manual_seed(23)
    kept = {**compressed(), **gptq(gptq_folder), **awq(awq_folder)}
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, TARGET)
    print(f"{TARGET}: {len(kept)} tensors, {TARGET.stat().st_size} bytes")


def compressed() -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    group = {"strategy": "group", "group_size": GROUP}
    schemes: dict[str, tuple[str, dict[str, Any]]] = {
        "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, **group}),
        "int4_asym": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, **group}),
        "int8_packed": ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True, **group}),
        "int8_packed_asym": ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": False, **group}),
        "int8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
        "fp8": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}),
        "fp8_tensor": ("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}),
        "nvfp4": (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
        ),
        "mxfp4": (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
        ),
    }
    kept: dict[str, torch.Tensor] = {}
    for name, (form, arguments) in schemes.items():
        weights = QuantizationArgs(**arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        state = one_module(weights)
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(dict(state), scheme)
        again = compressor.decompress(dict(packed), scheme)["weight"]
        kept |= {f"ct_{name}.{part}": value for part, value in packed.items() if value is not None}
        kept[f"ct_{name}.expected"] = again
    return kept


def one_module(weights: Any) -> dict[str, torch.Tensor]:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = torch.randn(
        ROWS, INPUTS, dtype=torch.float32 if weights.num_bits == 4 and weights.type == "float" else torch.bfloat16
    )
    shape = {"channel": (ROWS, INPUTS), "tensor": (1, ROWS * INPUTS)}.get(weights.strategy)
    blocks = weight.reshape(ROWS, -1, weights.group_size) if shape is None else weight.reshape(shape)
    low, high = blocks.amin(-1, keepdim=shape is not None), blocks.amax(-1, keepdim=shape is not None)
    if shape is not None and weights.strategy == "tensor":
        low, high = low.reshape(1), high.reshape(1)
    state = {"weight": weight}
    whole = None
    if weights.strategy == "tensor_group":
        whole = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = whole.reshape(1)
    scale, zero = calculate_qparams(low, high, weights, whole)
    state["weight_scale"] = scale
    if not weights.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    return state


def group_numbers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [rows, groups] of four bits; no zero point is 0, which GPTQ files cannot hold."""
    groups = weight.reshape(ROWS, -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15)


def gptq(folder: Path) -> dict[str, torch.Tensor]:
    source = folder / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept: dict[str, torch.Tensor] = {}
    for name, is_ordered in (("gptq", False), ("gptq_order", True)):
        linear = torch.nn.Linear(INPUTS, ROWS, bias=False)
        linear.weight.data = torch.randn(ROWS, INPUTS)
        scales, zeros = group_numbers(linear.weight.data)
        owner = torch.arange(INPUTS, dtype=torch.int32) // GROUP
        owner = owner[torch.randperm(INPUTS)] if is_ordered else owner
        packed = module.QuantLinear(4, GROUP, INPUTS, ROWS, False, weight_dtype=torch.float32)
        packed.pack(linear, scales, zeros, owner)
        packed.g_idx, packed.scales = owner, packed.scales.half().float()
        identity = packed(torch.eye(INPUTS))  # [inputs, rows]: each product has one term
        kept |= {f"{name}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "g_idx")}
        kept |= {f"{name}.scales": packed.scales.half(), f"{name}.expected": identity.T}
    return kept


def awq(folder: Path) -> dict[str, torch.Tensor]:
    package = types.ModuleType("awq")
    package.__path__ = [str(folder / "awq")]  # its own __init__ asks for much that is not needed here
    sys.modules["awq"] = package
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(INPUTS, ROWS, bias=False)
    linear.weight.data = torch.randn(ROWS, INPUTS)
    scales, zeros = group_numbers(linear.weight.data)
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    expected = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
    return {
        "awq.qweight": packed.qweight,
        "awq.qzeros": packed.qzeros,
        "awq.scales": packed.scales,
        "awq.expected": expected.T,
    }


if __name__ == "__main__":
    main()
