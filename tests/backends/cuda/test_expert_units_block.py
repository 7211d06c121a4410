"""A layer's experts in units as a model has them: routed, multiplied twice, summed, with biases and clamped gates; few
rows by the kernel in CUDA C++, emulated, many by way of floats. Held to plain float32 code."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.backends.cuda.packed_case import by_kernel, needs_compiler
from tests.backends.cuda.tables import H200
from tests.backends.cuda.test_expert_units import activated, filled

from twostroke.backends.cuda import moe as moe_module
from twostroke.backends.cuda.kernels.expert_tiles import GroupedTile, UnitExperts, UnpackedExperts, UnpackedTile
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.packed_format import FP8_UNITS, MX_UNITS, Code
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.matrix import Matrix
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.cuda.tuned_table import Choices, Table
from twostroke.models.spec import ClampedGate, MoeSpec

HIDDEN, TOKENS = 96, 5
PLAIN = MoeSpec(num_experts=4, experts_per_token=2, expert_intermediate_size=64)
GPT_OSS = replace(PLAIN, router_bias=True, has_bias=True, clamp=ClampedGate())


def expected(moe: MoeSpec, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """With the inner rows rounded as they are where they are kept."""
    logits = x.float() @ weights.router.float().T
    if weights.router_bias is not None:
        logits += weights.router_bias
    chosen = logits.topk(moe.experts_per_token, dim=-1)
    shares = torch.softmax(chosen.values, dim=-1)
    gates, downs = (matrix.low_bit.dequantised() for matrix in (weights.gate_up, weights.down))
    found = torch.zeros(x.shape, dtype=torch.float32)
    kind = moe.clamp or "silu"
    for token in range(len(x)):
        for expert, share in zip(chosen.indices[token].tolist(), shares[token].tolist(), strict=True):
            biases = [0.0 if one.bias is None else one.bias[expert].float() for one in (weights.gate_up, weights.down)]
            inner = activated(x[token].float() @ gates[expert].T + biases[0], kind).to(torch.bfloat16).float()
            found[token] += share * (inner @ downs[expert].T + biases[1])
    return found


def block_of(moe: MoeSpec, code: Code) -> tuple[MoeBlock, MoeWeights]:
    width, experts = moe.expert_intermediate_size, moe.num_experts
    torch.manual_seed(4)
    matrices = []
    for role, outputs, inputs in (("gated", width, HIDDEN), ("join", HIDDEN, width)):
        product = Product(role, outputs, inputs, moe.has_bias, experts, is_clamped=role == "gated" and bool(moe.clamp))
        units = filled(code, product.shape, is_gated=product.is_gated)
        bias = torch.randn(product.shape[:-1]).to(torch.bfloat16) if moe.has_bias else None
        matrices.append(Matrix(role, product, {code.name: units}, bias))
    router = torch.randn(experts, HIDDEN).to(torch.bfloat16) / 4
    weights = MoeWeights(router, *matrices, torch.randn(experts) if moe.router_bias else None)
    return MoeBlock(moe, weights, Choices(Table("a test", {}), H200)), weights


@needs_compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors of the host, for Triton's interpreter and the emulation")
@pytest.mark.parametrize("moe, code", [(GPT_OSS, MX_UNITS), (PLAIN, FP8_UNITS)], ids=["gpt-oss", "plain"])
@pytest.mark.parametrize("is_long", [False, True], ids=["few", "many"])
def test_a_layer_says_what_plain_code_says(
    moe: MoeSpec, code: Code, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, weights = block_of(moe, code)
    seen = []
    _, multiply = by_kernel("cpu")

    def emulated(inputs: torch.Tensor, coded: ExpertUnits, *rest: object, **options: object) -> None:
        seen.append(coded.code)
        multiply(inputs, coded, *rest, **{**options, "num_sms": 5})

    monkeypatch.setattr(moe_module, "packed_experts_product", emulated)
    if is_long:  # as of a prompt's rows; the interpreter has the kernels of every card alone
        small = GroupedTile(16, 32, 32, num_warps=4, num_stages=2, bulk=False)
        monkeypatch.setattr(UnitExperts, "tile", lambda *_: "too many rows")
        monkeypatch.setattr(UnpackedExperts, "tile", lambda *_: UnpackedTile(small))
    x = torch.randn(TOKENS, HIDDEN).to(torch.bfloat16)
    most = max(matrix.low_bit.dequantised().numel() for matrix in (weights.gate_up, weights.down))
    scratch = MoeScratch(moe, HIDDEN, TOKENS, torch.bfloat16, "cpu", most)
    out = torch.full_like(x, float("nan"))
    block.forward(x, out, scratch)
    wanted = expected(moe, weights, x)
    assert float((out.float() - wanted).norm() / wanted.norm()) < 1.5e-2
    assert seen == ([] if is_long else [code, code])
