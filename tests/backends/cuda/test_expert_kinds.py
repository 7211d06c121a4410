"""Experts of every kind that a family declares, against the reference's plain code: scoring, corrections, groups,
biases and clamped gates, by both paths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.cuda.tables import experts_by

from twostroke.backends.cuda.kernels.expert_choice import RouterTerms
from twostroke.backends.cuda.kernels.moe_routing import RoutingScratch, RoutingTile, choose_experts
from twostroke.backends.cuda.kernels.product import Product
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.host.routing import route
from twostroke.backends.reference.mlp import mixture_of_experts
from twostroke.backends.reference.weights import ExpertWeights, GatedMlp
from twostroke.models.spec import ClampedGate, MoeSpec, Routing

HIDDEN, MOE = 48, MoeSpec(num_experts=12, experts_per_token=3, expert_intermediate_size=40)
SMALL = {"rows": 16, "outputs": 16, "depth": 16, "num_warps": 4, "num_stages": 2, "bulk": False}
DEEPSEEK_V2 = Routing(num_groups=4, groups_per_token=2, share_scale=2.0)
DEEPSEEK_V3 = Routing("sigmoid", True, num_groups=4, groups_per_token=2, ranked_by=2, share_scale=2.5)
KINDS = {
    "plain": MOE,
    "gpt-oss": replace(MOE, router_bias=True, has_bias=True, clamp=ClampedGate(limit=0.5)),
    "DeepSeek V2": replace(MOE, normalise_weights=False, routing=DEEPSEEK_V2),
    "DeepSeek V3": replace(MOE, routing=DEEPSEEK_V3),
    "GLM": replace(MOE, routing=Routing("sigmoid", True, share_scale=1.5)),
    "corrected softmax": replace(MOE, router_bias=True, normalise_weights=False, routing=Routing(has_correction=True)),
    "softmax in ranked groups": replace(MOE, routing=replace(DEEPSEEK_V3, scoring="softmax", has_correction=False)),
    "biases alone": replace(MOE, has_bias=True, activation="gelu_tanh"),
}


def terms_of(moe: MoeSpec, rng: np.random.Generator, device: str) -> RouterTerms:
    def drawn(is_there: bool) -> torch.Tensor | None:
        return (
            torch.from_numpy(rng.standard_normal(moe.num_experts).astype(np.float32)).to(device) if is_there else None
        )

    return RouterTerms(moe.routing, drawn(moe.router_bias), drawn(moe.routing.has_correction))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2])
def test_experts_are_chosen_as_on_the_host(kind: str, parts: int, device: str) -> None:
    moe, rng = KINDS[kind], np.random.default_rng(5)
    terms = terms_of(moe, rng, device)
    x = torch.from_numpy(rng.standard_normal((21, HIDDEN)).astype(np.float32)).to(device)
    router = torch.from_numpy(rng.standard_normal((moe.num_experts, HIDDEN)).astype(np.float32)).to(device) / 4
    shares = torch.full((21, moe.experts_per_token), float("nan"), device=device)
    chosen = torch.full((21, moe.experts_per_token), -1, dtype=torch.int32, device=device)
    scratch, tile = RoutingScratch(moe.num_experts, 32, device), RoutingTile(16, parts, 16, num_stages=2)
    normalise = moe.normalise_weights
    choose_experts(x, router, scratch, shares, normalise=normalise, tile=tile, terms=terms, chosen=chosen)
    logits = (x @ router.T).cpu().numpy()
    if terms.bias is not None:
        logits += terms.bias.cpu().numpy()
    correction = None if terms.correction is None else terms.correction.cpu().numpy()
    their_experts, their_shares = route(moe, logits, correction)
    assert chosen.tolist() == their_experts.tolist()
    np.testing.assert_allclose(shares.cpu().numpy(), their_shares, rtol=1e-5)


def test_equal_groups_and_what_is_no_number_are_chosen_in_order(device: str) -> None:
    """Every expert has the same score: the first of the first groups are taken; a spoilt row's experts exist."""
    moe = KINDS["DeepSeek V3"]
    x = torch.zeros(2, HIDDEN, device=device)
    x[1] = float("nan")
    router = torch.ones(moe.num_experts, HIDDEN, device=device)
    shares = torch.zeros(2, 3, device=device)
    chosen = torch.full((2, 3), -1, dtype=torch.int32, device=device)
    zeros = torch.zeros(moe.num_experts, device=device)
    choose_experts(
        x, router, RoutingScratch(moe.num_experts, 32, device), shares, normalise=True, tile=RoutingTile(16, 1, 16),
        terms=RouterTerms(moe.routing, None, zeros), chosen=chosen,
    )  # fmt: skip
    assert chosen[0].tolist() == [0, 1, 2]
    assert len(set(chosen[1].tolist())) == 3 and chosen[1].min() >= 0 and chosen[1].max() < moe.num_experts
    assert shares[0].tolist() == pytest.approx([2.5 / 3] * 3) and shares[1].isnan().all()


def both_weights(moe: MoeSpec, device: str) -> tuple[MoeWeights, ExpertWeights]:
    """The same numbers on the device and on the host."""
    rng, width = np.random.default_rng(1), moe.expert_intermediate_size

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    router, gate_up = drawn(moe.num_experts, HIDDEN), drawn(moe.num_experts, 2 * width, HIDDEN)
    down, biases = (
        drawn(moe.num_experts, HIDDEN, width),
        (drawn(moe.num_experts, 2 * width), drawn(moe.num_experts, HIDDEN)),
    )
    gate_bias, down_bias = biases if moe.has_bias else (None, None)
    terms = terms_of(moe, rng, device)
    matrices = []
    products = (("gated", width, HIDDEN), gate_up, gate_bias), (("join", HIDDEN, width), down, down_bias)
    for (role, outputs, inputs), weight, bias in products:
        product = Product(role, outputs, inputs, moe.has_bias, moe.num_experts)  # type: ignore[arg-type]
        plain = {"plain": Plain(torch.from_numpy(weight).to(device))}
        matrices.append(Matrix(role, product, plain, None if bias is None else torch.from_numpy(bias).to(device)))
    experts = {
        expert: GatedMlp(
            gate_up[expert, width:], down[expert], gate_up[expert, :width],
            *(() if gate_bias is None or down_bias is None
              else (gate_bias[expert, :width], gate_bias[expert, width:], down_bias[expert])),
        )
        for expert in range(moe.num_experts)
    }  # fmt: skip
    on_host = [None if one is None else one.cpu().numpy() for one in (terms.bias, terms.correction)]
    ours = MoeWeights(torch.from_numpy(router).to(device), matrices[0], matrices[1], terms.bias, terms.correction)
    return ours, ExpertWeights(router, experts, *on_host)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
@pytest.mark.parametrize("path", ["few", "grouped", "grouped, weights first"])
def test_a_block_is_the_references(kind: str, path: str, device: str) -> None:
    moe = KINDS[kind]
    weights, theirs = both_weights(moe, device)
    gates = SMALL | {"weights_first": "first" in path}
    by = experts_by(gates, gates, device, torch.float32)
    if path == "few":
        by = experts_by({"outputs": 32, "depth": 32}, {}, device, torch.float32, kernel="few_experts")
    rng = np.random.default_rng(2)
    for num_tokens in (1, 19):
        x = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
        residual = rng.standard_normal((num_tokens, HIDDEN)).astype(np.float32)
        out = torch.from_numpy(residual.copy()).to(device)
        scratch = MoeScratch(moe, HIDDEN, 32, torch.float32, device)
        MoeBlock(moe, weights, by).forward(torch.from_numpy(x).to(device), out, scratch, residual=out)
        expected = residual + mixture_of_experts(moe, theirs, x)
        np.testing.assert_allclose(out.cpu().numpy(), expected, atol=3e-5)
