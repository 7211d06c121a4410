"""Packed copies where a model reads them: a layer's products, its experts, and whole models, each beside the same over
plain weights. On a Hopper card by the kernels themselves, elsewhere by their emulation."""

from __future__ import annotations

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
from tests.backends.cuda.packed_reference import pack, unpacked
from tests.backends.cuda.tables import empty_experts, table_of
from tests.models.tiny_checkpoints import make_tiny

from twostroke.backends.cuda import moe, product_launches
from twostroke.backends.cuda.kernels.packed_format import UNIT_ROWS
from twostroke.backends.cuda.kernels.product import Card, Product, Role
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch
from twostroke.backends.cuda.product_launches import ProductScratch
from twostroke.backends.cuda.products import Products, Stream
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Table, TableLine
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.spec import MoeSpec
from twostroke.models.weights.tensor import WeightKind

BF16 = torch.bfloat16
NEAR_TIE = 0.15
"""Of log-probabilities: what bf16 makes of a random model's logits may differ by so much."""
SIZES = Sizes(step_tokens=512, max_rows=16, max_context=256, block_size=64, num_blocks=80)


@dataclass
class Asked:
    """How often packed kernels were launched."""

    dense: int = 0
    experts: int = 0


@pytest.fixture
def asked(device: str, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """On a host, whose device has but one multiprocessor, four of them are emulated."""
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

    monkeypatch.setattr(product_launches, "packed_product", count_dense)
    monkeypatch.setattr(moe, "packed_experts_product", count_experts)
    return found


def card(device: str) -> Card:
    num_sms = target_of(device).num_sms if device == "cuda" else 2
    return Card("a test's", num_sms, has_hopper_kernels=True)


def packed_choices(device: str) -> Choices:
    """Packed copies are read wherever they can be, whatever their size."""
    lines = (TableLine(1, 128, "packed", {"groups": 2}),)
    turns = (TableLine(1, 128, "packed", {"groups": 2, "shared": True, "splits": 2}),)
    table = table_of({"packed": lines, "plain": ()})
    joins = {asked: {"packed": turns} for asked in table.products if asked.adds_parts and not asked.experts}
    others = {replace(asked, outputs=65): {"packed": lines} for asked in joins}  # where turns decline
    return Choices(table.with_others(joins).with_others(others), card(device))


@pytest.fixture
def tiny(tmp_path: Path) -> Checkpoint:
    return random_checkpoint(make_tiny("llama", tmp_path, hidden_size=256, intermediate_size=384)[0], WeightKind.BF16)


def matrix_of(role: Role, weight: torch.Tensor) -> tuple[Matrix, torch.Tensor]:
    """With a packed copy, and what that holds; the weights themselves are spoilt, so that nobody reads them."""
    asked = Product(role, len(weight) // (2 if role == "gated" else 1), weight.shape[1])
    copy = packed_copy(weight, is_gated=asked.is_gated)
    exact = unpacked(copy, len(weight)).float()
    return Matrix(role, asked, {"plain": Plain(weight.fill_(float("nan"))), "packed": copy}), exact


@pytest.mark.parametrize("num_rows", [3, pytest.param(70, marks=pytest.mark.slow)])
def test_a_layer_s_products(num_rows: int, tiny: Checkpoint, asked: Asked, device: str) -> None:
    torch.manual_seed(num_rows)
    spec, choices = tiny.spec, packed_choices(device)
    ours = Products(spec, ProductScratch(spec, 80, BF16, torch.device(device)), choices)
    hidden, outputs = spec.hidden_size, 4 * UNIT_ROWS * choices.card.num_sms - 8
    x = torch.randn(num_rows, hidden, device=device).to(BF16)
    norm = torch.ones(hidden, dtype=BF16, device=device)
    for number, (role, size) in enumerate((("plain", outputs), ("gated", 2 * outputs)), 1):
        matrix, exact = matrix_of(role, weights_at_random(size, hidden, device=device))
        out = torch.full((num_rows, outputs), float("nan"), dtype=BF16, device=device)
        ours.multiply(Stream(x, x, normed_by=norm), norm, matrix, out)
        kind = spec.layers[0].mlp.activation if role == "gated" else None
        assert_near(out, activated(x.float() @ exact.T, kind), BF16)
        assert asked.dense == number
    inner = torch.randn(num_rows, 2048, device=device).to(BF16)
    residual = torch.randn(num_rows, hidden, device=device).to(BF16)
    down, exact = matrix_of("join", weights_at_random(hidden, 2048, device=device))
    expected = residual.float() + inner.float() @ exact.T
    stream = Stream(residual, torch.empty_like(residual))
    ours.join(inner, down, stream, None, norm)
    assert asked.dense == 3 and stream.normed_by is norm
    assert_near(residual, expected, BF16)
    assert_near(stream.room, torch.nn.functional.rms_norm(expected, (hidden,), eps=spec.norm_eps), BF16, roundings=2)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_layer_s_experts(activation: Any, asked: Asked, device: str) -> None:
    """Some dozens of tokens read the copies, and more read the experts themselves."""
    torch.manual_seed(0)
    hidden, spec = 256, MoeSpec(num_experts=4, experts_per_token=2, expert_intermediate_size=128)
    weights, seen = (empty_experts(spec, hidden, BF16, device) for _ in range(2))
    seen.router.copy_(weights.router.copy_(weights_at_random(*weights.router.shape, device=device)))
    for matrix, plain in ((weights.gate_up, seen.gate_up), (weights.down, seen.down)):
        matrix.weight.copy_(weights_at_random(*matrix.weight.shape, device=device))
        matrix.make_room_for_packed()
        assert matrix.packed is not None
        pack(matrix.weight, matrix.packed)
        plain.weight.copy_(torch.stack(of_experts(matrix.packed, matrix.weight.shape[1])))
    scratch = MoeScratch(spec, hidden, 84, BF16, device)
    lines = {
        role: {
            "packed": (TableLine(1, 100, "packed_experts", {"rows": 24, "groups": groups, "units": units}),),
            "plain": (TableLine(1, NO_END, "grouped_experts"),),
        }
        for role, groups, units in (("gated", 2, 2), ("join", 4, 1))
    }
    table = Table("a test", {Product(role, 64, 64, experts=4): forms for role, forms in lines.items()})
    choices = Choices(table, card(device))
    for num_tokens, is_packed in ((2, True), (13, True), (48, True), (84, False)):
        x = torch.randn(num_tokens, hidden, device=device).to(BF16)
        found, plain = (torch.full_like(x, float("nan")) for _ in range(2))
        before = asked.experts
        MoeBlock(replace(spec, activation=activation), weights, choices).forward(x, found, scratch)
        assert asked.experts - before == (2 if is_packed else 0)
        MoeBlock(replace(spec, activation=activation), seen, choices).forward(x, plain, scratch)
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
        play(
            sizes.engine(
                checkpoint,
                sizes.on_device(checkpoint, device, BF16, pack_for_decode=choices is not None, choices=choices),
            ),
            requests,
        )
        for choices in (packed_choices(device), None)
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
    for choices in (packed_choices("cuda"), None):
        backend = SIZES.on_device(checkpoint, "cuda", BF16, pack_for_decode=choices is not None, choices=choices)
        answers.append(play(SIZES.engine(checkpoint, backend), requests))
        backend.close()
    assert asked.dense > 0 and (asked.experts > 0) == (variant == "qwen3_moe")
    compare(*answers)
