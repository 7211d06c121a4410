"""Packed copies where a model reads them: a layer's products, its experts, and whole models, each beside the same over
plain weights. On a Hopper card by the kernels themselves, elsewhere by their emulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.cuda.emulation import COMPILER
from tests.backends.cuda.engines import Answers, Sizes, mixed_requests, play
from tests.backends.cuda.packed_case import (
    HAS_HOPPER,
    activated,
    assert_near,
    by_kernel,
    needs_hopper,
    of_experts,
    packed_copy,
    weights_at_random,
)
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import moe, packed_sizes, products
from twostroke.backends.cuda.kernels import packed_tiles
from twostroke.backends.cuda.kernels.packed_format import UNIT_ROWS
from twostroke.backends.cuda.kernels.packed_tiles import choose_experts_tile, choose_packed_tile
from twostroke.backends.cuda.kernels.packed_weights import unpacked
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.cuda.packed_copies import PackedLayer
from twostroke.backends.cuda.products import Products, ProductScratch
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.spec import MoeSpec
from twostroke.models.weights.tensor import WeightKind

BF16 = torch.bfloat16
TINY = 1 << 12
NEAR_TIE = 0.15
"""Of log-probabilities: what bf16 makes of a random model's logits may differ by so much."""
SIZES = Sizes(step_tokens=512, max_rows=16, max_context=256, block_size=64, num_blocks=80)


@dataclass
class Asked:
    """How often packed kernels were launched."""

    dense: int = 0
    experts: int = 0


@pytest.fixture
def asked(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """Tiny matrices are packed; on a host, whose device has but one multiprocessor, four of them are emulated."""
    if not HAS_HOPPER and (device == "cuda" or COMPILER is None):
        pytest.skip("needs a Hopper device, or none and a C++ compiler")
    found = Asked()
    dense, experts = by_kernel(device)

    def count_dense(*given: Any, **settings: Any) -> None:
        found.dense += 1
        dense(*given, **settings)

    def count_experts(*given: Any, **settings: Any) -> None:
        found.experts += 1
        experts(*given, **settings)

    monkeypatch.setattr(products, "packed_product", count_dense)
    monkeypatch.setattr(moe, "packed_experts_product", count_experts)
    monkeypatch.setattr(packed_sizes, "MIN_WEIGHTS", TINY)
    monkeypatch.setattr(packed_tiles, "MIN_WEIGHTS", TINY)
    if device == "cpu":
        for module in (products, moe):
            monkeypatch.setattr(module, "target_of", lambda of: replace(target_of(of), num_sms=4))
    choose_packed_tile.cache_clear()
    yield found
    choose_packed_tile.cache_clear()


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    return random_checkpoint(make_tiny("llama", tmp_path, hidden_size=256, intermediate_size=384)[0], WeightKind.BF16)


@pytest.mark.parametrize("num_rows", [3, pytest.param(70, marks=pytest.mark.slow)])
def test_a_layer_s_products(num_rows: int, tiny: Checkpoint, asked: Asked, device: str) -> None:
    """Four units for each multiprocessor: enough for every rule."""
    torch.manual_seed(num_rows)
    spec = tiny.spec
    scratch = ProductScratch(spec, 80, BF16, torch.device(device))
    ours, num_sms = Products(spec, scratch), products.target_of(device).num_sms
    hidden, outputs = spec.hidden_size, 4 * UNIT_ROWS * num_sms - 8
    x = torch.randn(num_rows, hidden, device=device).to(BF16)
    wide, gates, down = (
        weights_at_random(*shape, device=device) for shape in ((outputs, hidden), (2 * outputs, hidden), (hidden, 2048))
    )
    packed_wide, packed_gates, packed_down = packed_copy(wide), packed_copy(gates, is_gated=True), packed_copy(down)
    exact_wide, exact_gates, exact_down = (
        unpacked(copy, len(weight)).float()
        for copy, weight in ((packed_wide, wide), (packed_gates, gates), (packed_down, down))
    )
    out = torch.full((num_rows, outputs), float("nan"), dtype=BF16, device=device)
    wide.fill_(float("nan"))  # nobody reads the matrices themselves
    ours.plain(x, wide, None, out, packed=packed_wide)
    assert_near(out, x.float() @ exact_wide.T, BF16)
    gates.fill_(float("nan"))
    ours.gated(x, gates, out, packed=packed_gates)
    assert_near(out, activated(x.float() @ exact_gates.T, spec.layers[0].mlp.activation), BF16)
    assert asked.dense == 2
    inner = torch.randn(num_rows, 2048, device=device).to(BF16)
    residual = torch.randn(num_rows, hidden, device=device).to(BF16)
    expected = residual.float() + inner.float() @ exact_down.T
    normed, norm = torch.empty_like(residual), torch.ones(hidden, dtype=BF16, device=device)
    down.fill_(float("nan"))
    ours.join(inner, down, None, residual, None, norm, normed, packed=packed_down)
    assert asked.dense == 3
    assert_near(residual, expected, BF16)
    assert_near(normed, torch.nn.functional.rms_norm(expected, (hidden,), eps=spec.norm_eps), BF16, roundings=2)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_layer_s_experts(activation: Any, asked: Asked, device: str) -> None:
    """Few tokens read the experts themselves, some dozens the copies, and more read the experts again."""
    torch.manual_seed(0)
    hidden, spec = 256, MoeSpec(num_experts=4, experts_per_token=2, expert_intermediate_size=128)
    weights = MoeWeights.empty(spec, hidden, BF16, device)
    for tensor in (weights.router, weights.gate_up, weights.down):
        tensor.copy_(weights_at_random(*tensor.shape, device=device))
    copies = PackedLayer(gate_up=packed_copy(weights.gate_up, is_gated=True), down=packed_copy(weights.down))
    assert copies.gate_up is not None and copies.down is not None
    seen = MoeWeights(
        weights.router,
        torch.stack(of_experts(copies.gate_up, 256)),
        torch.stack(of_experts(copies.down, hidden)),
    )
    scratch = MoeScratch(spec, hidden, 84, BF16, device)
    for num_tokens, is_packed in ((2, False), (13, True), (48, True), (84, False)):
        x = torch.randn(num_tokens, hidden, device=device).to(BF16)
        assert is_packed == (num_tokens > 4 and choose_experts_tile(2 * num_tokens, 4, 4, gated=True) is not None)
        found, plain = (torch.full_like(x, float("nan")) for _ in range(2))
        before = asked.experts
        MoeBlock(spec, weights, activation, copies).forward(x, found, scratch)
        assert asked.experts - before == (2 if is_packed else 0)
        MoeBlock(spec, seen, activation).forward(x, plain, scratch)
        # Gates, expert's results and their sum, of both; the interpreter cuts bf16 off.
        assert_near(found, plain.float(), BF16, roundings=3)


def compare(packed: Answers, plain: Answers) -> None:
    """Greedy tokens are equal, up to where the two best are as good as equal; log-probabilities are near until then."""
    num_equal = 0
    for name, tokens in plain.tokens.items():
        for ours, theirs in zip(packed.logprobs[name], plain.logprobs[name], strict=True):
            by_token = dict(theirs.top)
            assert by_token.get(ours.token_id, -1e9) > theirs.logprob - NEAR_TIE, f"{name} parted, and not at a tie"
            assert abs(ours.logprob - by_token[ours.token_id]) < NEAR_TIE
            if ours.token_id != theirs.token_id:
                break
            num_equal += 1
        assert len(packed.tokens[name]) == len(tokens)
    assert num_equal > sum(map(len, plain.tokens.values())) // 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant, changes, num_dense",
    [
        ("llama", {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}, 8),
        (
            "qwen3_moe",
            {"hidden_size": 256, "num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 128},
            4,
        ),
    ],
)
def test_an_emulated_model_says_the_same(
    variant: str, changes: dict[str, Any], num_dense: int, tmp_path: Path, asked: Asked, device: str
) -> None:
    if device == "cuda":
        pytest.skip("a larger one runs on the card")
    checkpoint = random_checkpoint(make_tiny(variant, tmp_path, **changes)[0], WeightKind.BF16)
    sizes = Sizes()
    requests = mixed_requests([5, 17], [4, 3, 2], ignore_eos=True, logprobs=5)
    answers = [
        play(sizes.engine(checkpoint, sizes.on_device(checkpoint, device, BF16, pack_for_decode=is_packed)), requests)
        for is_packed in (True, False)
    ]
    assert asked.dense > num_dense and (asked.experts > 0) == (variant == "qwen3_moe")
    compare(*answers)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "variant, changes",
    [
        ("llama", {"hidden_size": 512, "intermediate_size": 8192, "head_dim": 64, "num_attention_heads": 32}),
        ("gemma2", {"hidden_size": 512, "intermediate_size": 8192, "head_dim": 64}),
        ("qwen3_moe", {"hidden_size": 512, "head_dim": 64, "num_experts": 16, "moe_intermediate_size": 256}),
    ],
)
def test_a_model_on_a_card_says_the_same(variant: str, changes: dict[str, Any], tmp_path: Path, asked: Asked) -> None:
    checkpoint = random_checkpoint(make_tiny(variant, tmp_path, **changes)[0], WeightKind.BF16)
    requests = mixed_requests([5, 17, 40, 1, 60, 3, 9, 33, 100, 70], [24] * 11, ignore_eos=True, logprobs=5)
    answers = []
    for is_packed in (True, False):
        backend = SIZES.on_device(checkpoint, "cuda", BF16, pack_for_decode=is_packed)
        answers.append(play(SIZES.engine(checkpoint, backend), requests))
        backend.close()
    assert asked.dense > 0 and (asked.experts > 0) == (variant == "qwen3_moe")
    compare(*answers)
