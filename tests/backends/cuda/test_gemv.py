from dataclasses import replace

import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, assert_close, poisoned, random
from tests.backends.cuda.tables import H200
from torch.nn import functional
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from twostroke.backends.cuda.kernels.gemv import linear_few
from twostroke.backends.cuda.kernels.gemv_config import GemvConfig, GemvProducts, fit
from twostroke.backends.cuda.kernels.product import Product

EPS = 1e-5
FMA = GemvConfig("fma", block_n=4, block_k=256, num_warps=1, prefetch_tiles=1)
DOT = GemvConfig("dot", block_n=16, block_k=32, num_warps=2, num_stages=2)
CONFIGS = [FMA, replace(FMA, block_n=1, prefetch_tiles=2), DOT]


def expected(x, weight, norm_weight=None, bias=None, residual=None, gated=None):
    """The same in torch's float32."""
    x = x.float()
    if norm_weight is not None:
        x = functional.rms_norm(x, x.shape[1:], norm_weight.float(), EPS)
    y = functional.linear(x, weight.float(), None if bias is None else bias.float())
    if gated is not None:
        gate, up = y.chunk(2, dim=1)
        y = (functional.silu(gate) if gated == "silu" else functional.gelu(gate, approximate="tanh")) * up
    return y if residual is None else y + residual.float()


def check(device, dtype, rows, outputs, width, config, *, normed=False, biased=False, gated=None, out_dtype=None):
    kinds = {"dtype": dtype, "device": device}
    x = random(rows, width, **kinds)
    weight = random(outputs * (2 if gated else 1), width, **kinds) * width**-0.5
    options = {
        "norm_weight": random(width, seed=1, **kinds) + 1 if normed else None,
        "bias": random(len(weight), seed=2, **kinds) if biased else None,
        "gated": gated,
    }
    out = poisoned(rows, outputs, dtype=out_dtype or dtype, device=device)
    linear_few(x, weight, out, eps=EPS, config=config, **options)
    reference = expected(x, weight, **options)
    assert_close(out if out_dtype is None else out.to(dtype), reference)


@pytest.mark.parametrize("config", CONFIGS, ids=["fma", "fma-narrow", "dot"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_plain_products(device, config, dtype, rows):
    check(device, dtype, rows, outputs=6, width=512, config=config)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
@pytest.mark.parametrize("width", [576, 40, 264])
def test_widths_that_no_block_divides(device, config, width):
    check(device, torch.float32, 2, outputs=19, width=width, config=config, normed=True, gated="silu")


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_norm_ahead(device, config, dtype, rows):
    check(device, dtype, rows, outputs=16, width=256, config=config, normed=True)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
@pytest.mark.parametrize("gated", ["silu", "gelu_tanh"])
def test_norm_bias_and_gate_together(device, config, gated):
    check(device, torch.float32, 5, outputs=18, width=256, config=config, normed=True, biased=True, gated=gated)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
def test_logits_come_out_in_float32(device, config):
    check(device, torch.bfloat16, 2, outputs=33, width=256, config=config, normed=True, out_dtype=torch.float32)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_is_updated_in_place(device, config, dtype):
    x = random(3, 256, dtype=dtype, device=device)
    weight = random(24, 256, dtype=dtype, device=device) / 16
    residual = random(3, 24, dtype=dtype, device=device, seed=9)
    reference = expected(x, weight, residual=residual)
    linear_few(x, weight, residual, residual=residual, config=config)
    assert_close(residual, reference)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
def test_rows_of_a_wider_buffer_and_nothing_beside_them(device, config):
    """Inputs and outputs with strides; rows beyond the batch and columns beside it stay as they were."""
    x = random(5, 600, dtype=torch.float32, device=device)
    weight = random(18, 256, dtype=torch.float32, device=device)
    out = torch.full((5, 40), 7.0, device=device)
    linear_few(x[:3, :256], weight, out[:3, :18], config=config)
    assert_close(out[:3, :18], expected(x[:3, :256], weight))
    assert (out[3:] == 7.0).all() and (out[:, 18:] == 7.0).all()


def test_rows_padded_for_tensor_cores(device):
    check(device, torch.float32, 7, outputs=16, width=256, config=DOT, normed=True)


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
def test_float16_rows_too_large_for_their_product_with_the_norms_weight(device, config):
    x = random(2, 256, dtype=torch.float16, device=device) * 15000
    norm_weight = torch.full((256,), 12.0, dtype=torch.float16, device=device)
    weight = random(16, 256, dtype=torch.float16, device=device) / 16
    out = poisoned(2, 16, dtype=torch.float16, device=device)
    linear_few(x, weight, out, norm_weight=norm_weight, eps=EPS, config=config)
    assert_close(out, expected(x, weight, norm_weight=norm_weight))


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
def test_an_mlp_is_transformers(device, config):
    """Norm, gate, up, down and the residual, in two launches."""
    hidden, intermediate = 96, 40
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(hidden_size=hidden, intermediate_size=intermediate)).to(device).requires_grad_(False)
    norm = LlamaRMSNorm(hidden, EPS).to(device).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    residual = random(3, hidden, dtype=torch.float32, device=device)
    reference = residual + mlp(norm(residual))
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    between = poisoned(3, intermediate, dtype=torch.float32, device=device)
    linear_few(residual, gate_up, between, norm_weight=norm.weight, eps=EPS, gated="silu", config=config)
    linear_few(between, mlp.down_proj.weight, residual, residual=residual, config=config)
    assert_close(residual, reference)


@pytest.mark.parametrize("width", [64, 576, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 8960, 14336])
def test_every_candidate_is_one_that_a_kernel_can_run(width):
    kernel = GemvProducts()
    for rows, role in ((1, "plain"), (2, "gated"), (3, "join"), (8, "head")):
        product = Product(role, 6144, width)
        found = kernel.candidates(product, rows, H200)
        assert found and not isinstance(kernel.tile(product, rows, H200, found[0]), str)
        for config in (fit(GemvConfig(**settings), width) for settings in found):
            assert config.block_k & (config.block_k - 1) == 0
            block = config.block_k * (config.num_warps if config.method == "dot" else 1)
            assert config.prefetch_tiles <= -(-width // config.block_k)
            assert -(-width // block) * block - width <= max(width // 8, 255), "a masked end that costs too much"


def test_what_it_does_not_take_is_declined_with_a_reason():
    kernel, fma = GemvProducts(), {"method": "fma", "block_n": 4, "block_k": 1024, "num_warps": 4}
    assert "8 rows at most" in str(kernel.tile(Product("plain", 64, 64), 9, H200, fma))
    assert "no norm of its own" in str(kernel.tile(Product("sandwich", 64, 64), 1, H200, fma))
    assert "one matrix" in str(kernel.tile(Product("gated", 64, 64, experts=4), 1, H200, fma))


def test_a_block_is_cut_to_suit_the_width():
    assert fit(GemvConfig("fma", 4, 2048, 8), 3072).block_k == 1024
    assert fit(GemvConfig("fma", 4, 1024, 4), 2560) == GemvConfig("fma", 4, 512, 2)
    assert fit(GemvConfig("fma", 4, 2048, 8), 8960).block_k == 1024, "2.8% masked is better than small blocks"
    assert fit(GemvConfig("dot", 16, 128, 4), 2560).block_k == 128
    assert fit(GemvConfig("dot", 16, 128, 4), 576).block_k == 32
