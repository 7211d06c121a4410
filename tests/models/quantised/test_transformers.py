"""Our reading against transformers' own dequantisers, bit by bit, for the formats that it reads on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.models.quantised.folders import make_quantised, mx_parts
from tests.models.quantised.test_folders import TOKENS, logits_of
from tests.models.tiny_checkpoints import transformers_logits
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from twostroke.models.loading import load_checkpoint
from twostroke.models.quantised.scheme import Layout, MatrixScheme, Strategy
from twostroke.models.weights.safetensors import RawTensor
from twostroke.models.weights.stored_layouts import read_stored
from twostroke.models.weights.stored_module import Stored


def raw(name: str, tensor: torch.Tensor) -> RawTensor:
    return RawTensor(name, "U8", tuple(tensor.shape), tensor.contiguous().numpy().reshape(-1))


def test_fp8_blocks(tmp_path: Path) -> None:
    folder, _ = make_quantised("fp8_block", tmp_path)
    found, stored = load_checkpoint(folder), load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj."
    expected = Fp8Dequantize(None)._dequantize_one(stored[name + "weight"], stored[name + "weight_scale_inv"])
    np.testing.assert_array_equal(found.tensors["layers.1.down"].to_float32(), expected.numpy())


def test_mxfp4_experts() -> None:
    torch.manual_seed(1)
    parts = [mx_parts(torch.randn(24, 64)) for _ in range(3)]
    blocks = torch.stack([packed for packed, _, _ in parts]).reshape(3, 24, 2, 16)
    scales = torch.stack([exponents for _, exponents, _ in parts])
    scheme = MatrixScheme(Layout.MXFP4_BLOCKS, 4, Strategy.GROUP, 32)
    tensor = read_stored(Stored("f", "experts", {"blocks": raw("b", blocks), "scales": raw("s", scales)}, scheme))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, inputs, rows]
    assert tensor.shape == (3, 24, 64)
    np.testing.assert_array_equal(tensor.to_float32(), theirs.transpose(1, 2).numpy())


@pytest.mark.parametrize("form", ["fp8_block", "ct_int4_asym", "gptq_order", "awq", "ct_nvfp4"])
def test_logits_of_the_floats_that_are_meant(form: str, tmp_path: Path) -> None:
    """Over floats: to open the quantised folders itself, transformers asks for packages that are not here."""
    quantised, meant = make_quantised(form, tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(meant, dtype=torch.float32, attn_implementation="eager")
    found = logits_of(load_checkpoint(quantised))
    np.testing.assert_allclose(found, transformers_logits(model.eval(), TOKENS), rtol=1e-3, atol=1e-4)
