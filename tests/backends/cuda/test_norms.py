import pytest
import torch
from tests.backends.cuda.closeness import DTYPES, assert_close, poisoned, random
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from twostroke.backends.cuda.kernels.norms import add_rms_norm, layer_norm, norm_spans, rms_norm

EPS = 1e-5
SHAPES = [(1, 64), (3, 100), (2, 576)]


def llama_norm(x, weight):
    """The norm as transformers has it, in float32."""
    norm = LlamaRMSNorm(x.shape[-1], eps=EPS).to(x.device)
    norm.weight.data = weight.float()
    return norm(x.float()).detach()


def gemma_norm(x, weight):
    """Gemma's, whose stored weight is one less than what the row is multiplied by."""
    norm = Gemma2RMSNorm(x.shape[-1], eps=EPS).to(x.device)
    norm.weight.data = weight.float() - 1
    return norm(x.float()).detach()


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.fixture(params=DTYPES, ids=str)
def tensors(request, shape, device):
    """x, residual, weight and post_weight of one type."""
    kinds = {"dtype": request.param, "device": device}
    tokens, hidden = shape
    rows = [random(tokens, hidden, seed=seed, **kinds) * 3 for seed in (1, 2)]
    return (*rows, *(random(hidden, seed=seed, **kinds) + 1 for seed in (3, 4)))


def test_rms_norm_is_llamas(tensors):
    x, _, weight, _ = tensors
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, out, eps=EPS)
    assert_close(out, llama_norm(x, weight))


def test_rms_norm_of_rows_with_a_stride_and_in_place(tensors):
    x, residual, weight, _ = tensors
    wide = torch.cat([x, residual], 1)
    expected = llama_norm(x, weight)
    view = wide[:, : x.shape[1]]
    rms_norm(view, weight, view, eps=EPS)
    assert_close(view, expected)
    assert torch.equal(wide[:, x.shape[1] :], residual)


def test_add_rms_norm_updates_the_residual_and_norms_it(tensors):
    x, residual, weight, _ = tensors
    total = x.float() + residual.float()
    out = torch.full_like(x, float("nan"))
    add_rms_norm(x, residual, weight, out, eps=EPS)
    assert_close(residual, total)
    assert_close(out, llama_norm(residual, weight))


@pytest.mark.parametrize("parts", [2, 5])
def test_parts_of_a_product_are_added_up_first(tensors, parts):
    x, residual, weight, _ = tensors
    cut = torch.randn(parts, *x.shape, device=x.device)
    total, plain = cut.sum(0) + residual.float(), residual.clone()
    out = torch.full_like(x, float("nan"))
    add_rms_norm(cut, residual, weight, out, eps=EPS)
    assert_close(residual, total)
    assert_close(out, llama_norm(residual, weight))
    add_rms_norm(cut, plain, None, None, eps=EPS)
    assert torch.equal(plain, residual)


def test_sandwich_is_two_of_gemmas_norms_around_the_residual(tensors):
    x, residual, weight, post_weight = tensors
    total = residual.float() + gemma_norm(x, post_weight)
    out = torch.full_like(x, float("nan"))
    add_rms_norm(x, residual, weight, out, eps=EPS, post_weight=post_weight)
    assert_close(residual, total)
    assert_close(out, gemma_norm(residual, weight))


def test_sandwich_without_a_norm_to_follow(tensors):
    x, residual, _, post_weight = tensors
    total = residual.float() + gemma_norm(x, post_weight)
    add_rms_norm(x, residual, None, None, eps=EPS, post_weight=post_weight)
    assert_close(residual, total)


def test_weights_may_be_float32_beside_narrower_rows(device):
    x = random(2, 48, dtype=torch.bfloat16, device=device)
    weight = random(48, dtype=torch.float32, device=device)
    out = poisoned(2, 48, dtype=torch.bfloat16, device=device)
    rms_norm(x, weight, out, eps=EPS)
    assert_close(out, llama_norm(x, weight))


def test_float16_rows_whose_squares_overflow_it(device):
    x = random(2, 48, dtype=torch.float16, device=device) * 10000
    weight = random(48, dtype=torch.float16, device=device)
    out = poisoned(2, 48, dtype=torch.float16, device=device)
    rms_norm(x, weight, out, eps=EPS)
    assert_close(out, llama_norm(x, weight))


def test_no_tokens(device):
    x = random(4, 16, dtype=torch.float32, device=device)
    rms_norm(x[:0], x[0], x[:0], eps=EPS)


def test_a_layer_that_ends_scales_the_stream(tensors):
    """What follows is normed of the scaled one."""
    x, residual, weight, post_weight = tensors
    total = (residual.float() + llama_norm(x, post_weight)) * 0.25
    scale, out = torch.tensor([0.25], device=x.device), torch.full_like(x, float("nan"))
    add_rms_norm(x, residual, weight, out, eps=EPS, post_weight=post_weight, scale=scale)
    assert_close(residual, total)
    assert_close(out, llama_norm(residual, weight))


def test_a_gain_is_of_the_norm_alone(tensors):
    x, _, weight, _ = tensors
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, out, eps=EPS, gain=0.125)
    assert_close(out, llama_norm(x, weight) * 0.125)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(64, 64), (96, 32), (1200, 80)])
def test_heads_are_normed_together(device, dtype, widths):
    """Queries by themselves and keys by themselves, of very different sizes; what is behind them stays."""
    queries, keys = (random(3, width, dtype=dtype, device=device, seed=width) for width in widths)
    keys, behind = keys * 20, random(3, 40, dtype=dtype, device=device)
    q_norm, k_norm = (random(width, dtype=dtype, device=device, seed=1) + 1 for width in widths)
    together = torch.cat([queries, keys, behind], 1)
    norm_spans(together, q_norm, k_norm, eps=EPS)
    assert_close(together[:, : widths[0]], llama_norm(queries, q_norm))
    assert_close(together[:, widths[0] : sum(widths)], llama_norm(keys, k_norm))
    assert torch.equal(together[:, sum(widths) :], behind)


def test_layer_norm_is_torchs(tensors):
    """Of rows that stand far from zero."""
    x, bias, weight, _ = tensors
    x, bias = x + 7, bias[0].clone()
    expected = torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight.float(), bias.float(), EPS)
    layer_norm(x, weight, bias, eps=EPS)
    assert_close(x, expected)
