"""The mixture of experts on the device against plain float32 torch, and against transformers' own block; all paths,
whatever the routing does. Without a GPU kernels run in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from tests.backends.cuda.plain_launches import plain_launches
from tests.backends.cuda.tables import H200, empty_experts, experts_by
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from twostroke.backends.cuda import moe as module
from twostroke.backends.cuda.kernels.expert_tiles import MAX_PACKED_EXPERTS, FewTile
from twostroke.backends.cuda.kernels.moe_combine import NextNorm
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeWeights
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.tuned_table import Choices, table_for
from twostroke.models.spec import MoeSpec

HIDDEN = 48
MOE = MoeSpec(num_experts=6, experts_per_token=3, expert_intermediate_size=40)
MAX_TOKENS = 40
PATHS = ["few", "grouped"]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
SMALL: dict[str, Any] = {"rows": 16, "outputs": 32, "depth": 16, "num_warps": 4, "num_stages": 2, "bulk": False}
GATES, DOWNS = SMALL | {"outputs": 16}, SMALL | {"weights_first": True}
WAYS_TO_READ: list[dict[str, Any]] = [
    {"bulk": True},
    {"bulk": True, "weights_first": True},
    {"weights_first": True},
]


def choices(path: str, dtype: torch.dtype, device: str, gates: Any = GATES, downs: Any = DOWNS) -> Choices:
    """Of small tiles, which the interpreter is done with sooner."""
    if path == "few":
        return experts_by({"outputs": 32, "depth": 32}, {}, device, dtype, kernel="few_experts")
    return experts_by(gates, downs, device, dtype)


def weights_of(moe: MoeSpec, dtype: torch.dtype, device: str, hidden: int = HIDDEN) -> MoeWeights:
    generator = torch.Generator().manual_seed(1)
    weights = empty_experts(moe, hidden, dtype, device)
    for tensor in (weights.router, weights.gate_up.weight, weights.down.weight):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return weights


def inputs(num_tokens: int, dtype: torch.dtype, device: str, hidden: int = HIDDEN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, hidden, generator=generator).to(device, dtype)


def expected_output(moe: MoeSpec, weights: MoeWeights, x: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """One token and one expert at a time, in float32."""
    x = x.float()
    shares = torch.softmax(x @ weights.router.float().T, dim=-1)
    out = torch.zeros_like(x)
    for token in range(len(x)):
        order = sorted(range(moe.num_experts), key=lambda expert: (-shares[token, expert].item(), expert))
        chosen = order[: moe.experts_per_token]
        total = shares[token, chosen].sum() if moe.normalise_weights else 1.0
        for expert in chosen:
            gate, up = (weights.gate_up.weight[expert].float() @ x[token]).chunk(2)
            is_silu = activation == "silu"
            act = torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")
            out[token] += shares[token, expert] / total * (weights.down.weight[expert].float() @ (act * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 7, MAX_TOKENS])
def test_experts_without_gates(num_tokens: int, device: str) -> None:
    """What is above zero is squared; the product of as many outputs as there are rows of weights."""
    moe = replace(MOE, is_gated=False, squared_relu=True)
    by = Choices(table_for("none"), card_of(torch.device(device), torch.float32))
    weights, x = weights_of(moe, torch.float32, device), inputs(num_tokens, torch.float32, device)
    assert weights.gate_up.weight.shape == (moe.num_experts, moe.expert_intermediate_size, HIDDEN)
    shares = torch.softmax(x @ weights.router.T, dim=-1)
    best, chosen = shares.topk(moe.experts_per_token)
    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        for share, expert in zip(best[token] / best[token].sum(), chosen[token], strict=True):
            inner = (weights.gate_up.weight[expert] @ x[token]).clamp(min=0) ** 2
            expected[token] += share * (weights.down.weight[expert] @ inner)
    found = run(moe, weights, x, by)
    assert float((found - expected).abs().max()) < TOLERANCES[torch.float32] * max(1, float(expected.abs().max()))


def test_shares_of_experts_have_scales_and_the_router_inputs_of_its_own(device: str) -> None:
    """Of few tokens and of many; where results go to the router's own inputs."""
    weights = weights_of(MOE, torch.float32, device)
    scales = torch.linspace(0.5, 2.0, MOE.num_experts, device=device)
    scaled = replace(weights, scales=scales)
    for path in PATHS:
        x, for_router = (inputs(count, torch.float32, device)[:5] for count in (5, 6))
        by = choices(path, torch.float32, device)
        shares = torch.softmax(for_router @ weights.router.T, dim=-1)
        best, chosen = shares.topk(MOE.experts_per_token)
        best = best / best.sum(1, keepdim=True) * scales[chosen]
        expected = torch.zeros_like(x)
        for token in range(len(x)):
            for share, expert in zip(best[token], chosen[token], strict=True):
                gate, up = (weights.gate_up.weight[expert] @ x[token]).chunk(2)
                expected[token] += share * (weights.down.weight[expert] @ (torch.nn.functional.silu(gate) * up))
        scratch, out = MoeScratch(MOE, HIDDEN, MAX_TOKENS, x.dtype, x.device), for_router.clone()
        MoeBlock(MOE, scaled, by).forward(x, out, scratch, for_router=out)
        assert float((out - expected).abs().max()) < TOLERANCES[torch.float32]


def run(moe: MoeSpec, weights: MoeWeights, x: torch.Tensor, by: Choices) -> torch.Tensor:
    hidden = x.shape[1]
    scratch = MoeScratch(moe, hidden, max(MAX_TOKENS, len(x)), x.dtype, x.device)
    out = torch.full_like(x, float("nan"))
    MoeBlock(moe, weights, by).forward(x, out, scratch)
    return out


def assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.05, "outputs this flat would prove nothing"
    assert (ours.float() - expected).abs().max() < TOLERANCES[ours.dtype] * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(
    ("path", "num_tokens"),
    [
        *(("few", num_tokens) for num_tokens in (1, 2, 17)),
        *(("grouped", num_tokens) for num_tokens in (1, 2, 5, 16, 17, 40)),
    ],
)
def test_every_path(path: str, num_tokens: int, device: str) -> None:
    weights, x = weights_of(MOE, torch.float32, device), inputs(num_tokens, torch.float32, device)
    assert_close(run(MOE, weights, x, choices(path, x.dtype, device)), expected_output(MOE, weights, x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(path: str, dtype: torch.dtype, device: str) -> None:
    weights, x = weights_of(MOE, dtype, device), inputs(7, dtype, device)
    assert_close(run(MOE, weights, x, choices(path, x.dtype, device)), expected_output(MOE, weights, x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "moe",
    [
        replace(MOE, normalise_weights=False),
        replace(MOE, experts_per_token=1),
        replace(MOE, experts_per_token=6),
        MoeSpec(num_experts=16, experts_per_token=4, expert_intermediate_size=32),
        MoeSpec(num_experts=1, experts_per_token=1, expert_intermediate_size=64),
    ],
    ids=lambda moe: f"{moe.experts_per_token}of{moe.num_experts}",
)
def test_other_mixtures(path: str, moe: MoeSpec, device: str) -> None:
    weights, x = weights_of(moe, torch.float32, device), inputs(5, torch.float32, device)
    assert_close(run(moe, weights, x, choices(path, x.dtype, device)), expected_output(moe, weights, x))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("favourites", [(4,), (0, 1, 2), (5, 3, 0)])
def test_all_tokens_to_the_same_experts(path: str, favourites: tuple[int, ...], device: str) -> None:
    """Experts with more than two tiles, and experts with none."""
    num_tokens = 3 if path == "few" else 37
    weights, x = weights_of(MOE, torch.float32, device), inputs(num_tokens, torch.float32, device).abs()
    weights.router.fill_(-1.0)
    for rank, expert in enumerate(favourites):
        weights.router[expert] = 1.0 - 0.01 * rank
    assert_close(run(MOE, weights, x, choices(path, x.dtype, device)), expected_output(MOE, weights, x))


@pytest.mark.parametrize("path", PATHS)
def test_of_equal_experts_the_lower_are_chosen(path: str, device: str) -> None:
    weights, x = weights_of(MOE, torch.float32, device), inputs(5, torch.float32, device)
    weights.router.zero_()
    chosen = [
        [(weights.gate_up.weight[expert] @ row).chunk(2) for expert in range(MOE.experts_per_token)] for row in x
    ]  # each token's experts 0, 1, 2
    expected = torch.stack(
        [
            sum(
                weights.down.weight[expert] @ (torch.nn.functional.silu(gate) * up) / MOE.experts_per_token
                for expert, (gate, up) in enumerate(parts)
            )
            for parts in chosen
        ]
    )
    assert_close(run(MOE, weights, x, choices(path, x.dtype, device)), expected)


@pytest.mark.parametrize("path", PATHS)
def test_gelu_and_a_residual_in_place(path: Any, device: str) -> None:
    weights, x = weights_of(MOE, torch.float32, device), inputs(6, torch.float32, device)
    residual = inputs(60, torch.float32, device)[:6].clone()
    expected = residual + expected_output(MOE, weights, x, "gelu_tanh")
    scratch = MoeScratch(MOE, HIDDEN, MAX_TOKENS, x.dtype, device)
    block = MoeBlock(replace(MOE, activation="gelu_tanh"), weights, choices(path, x.dtype, device))
    block.forward(x, residual, scratch, residual=residual)
    assert_close(residual, expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_a_spoilt_row_spoils_no_other(path: str, device: str) -> None:
    """Not-a-number logits must not send a row to an expert that does not exist."""
    weights, x = weights_of(MOE, torch.float32, device), inputs(6, torch.float32, device)
    expected = expected_output(MOE, weights, x)
    x[2] = float("nan")
    x[4, 5] = float("inf")
    ours = run(MOE, weights, x, choices(path, x.dtype, device))
    healthy = [0, 1, 3, 5]
    assert_close(ours[healthy], expected[healthy])
    assert not ours[2].isfinite().any()


def test_scratch_serves_steps_of_all_sizes(device: str) -> None:
    """What a larger step left behind does not reach a smaller one."""
    weights = weights_of(MOE, torch.float32, device)
    scratch = MoeScratch(MOE, HIDDEN, MAX_TOKENS, torch.float32, device)
    for num_tokens in (40, 3, 20, 1, 9):
        x = inputs(num_tokens, torch.float32, device)
        out = torch.empty_like(x)
        by = choices("few" if num_tokens < 4 else "grouped", x.dtype, device)
        MoeBlock(MOE, weights, by).forward(x, out, scratch)
        assert_close(out, expected_output(MOE, weights, x))


def test_the_tiles_it_chooses_itself(device: str) -> None:
    """Of every number of rows: a lone expert gets all tokens."""
    lone = MoeSpec(num_experts=1, experts_per_token=1, expert_intermediate_size=40)
    for moe, num_tokens in ((MOE, 1), (MOE, 8), (MOE, 40), (lone, 40), (lone, 70)):
        weights, x = weights_of(moe, torch.float32, device), inputs(num_tokens, torch.float32, device)
        by = Choices.on(card_of(torch.device(device), x.dtype))
        assert_close(run(moe, weights, x, by), expected_output(moe, weights, x))


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("changes", WAYS_TO_READ, ids=" ".join)
def test_other_ways_to_read(changes: dict[str, Any], rows: int, device: str) -> None:
    """Inputs that the depth divides and does not; outputs that cross from one expert's matrix to the next."""
    gates, downs = ({**SMALL, "rows": rows, "depth": depth, **changes} for depth in (32, 16))
    for intermediate in (40, 64):
        moe = replace(MOE, expert_intermediate_size=intermediate)
        weights, x = weights_of(moe, torch.float32, device), inputs(21, torch.float32, device)
        by = choices("grouped", x.dtype, device, gates, downs)
        assert_close(run(moe, weights, x, by), expected_output(moe, weights, x))


def test_what_cannot_be_copied_in_bulk_is_read_otherwise(device: str) -> None:
    moe = replace(MOE, expert_intermediate_size=37)
    weights, x = weights_of(moe, torch.float32, device), inputs(9, torch.float32, device)
    by = choices("grouped", x.dtype, device, downs=SMALL | {"bulk": True})
    assert_close(run(moe, weights, x, by), expected_output(moe, weights, x))


@pytest.mark.parametrize("path", PATHS)
def test_the_next_norm_replaces_the_input(path: Any, device: str) -> None:
    weights, x = weights_of(MOE, torch.float32, device), inputs(6, torch.float32, device)
    residual = inputs(60, torch.float32, device)[:6].clone()
    expected = residual + expected_output(MOE, weights, x)
    norm_weight = inputs(1, torch.float32, device)[0]
    scratch = MoeScratch(MOE, HIDDEN, MAX_TOKENS, x.dtype, device)
    following = NextNorm(norm_weight, x, eps=1e-5)
    block = MoeBlock(MOE, weights, choices(path, x.dtype, device))
    block.forward(x, residual, scratch, residual=residual, next_norm=following)
    assert_close(residual, expected)
    assert_close(x, torch.nn.functional.rms_norm(expected, (HIDDEN,), norm_weight, 1e-5))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no card")
@pytest.mark.parametrize("path", PATHS)
def test_a_captured_chain_of_dependent_launches(path: Any, device: str) -> None:
    """Two layers in a graph, replayed with other tokens than were captured: nothing of the routing is baked in."""
    moe = MoeSpec(num_experts=16, experts_per_token=4, expert_intermediate_size=64)
    weights, num_tokens = weights_of(moe, torch.bfloat16, device, hidden=128), 3 if path == "few" else 70
    x, residual = (inputs(num_tokens, torch.bfloat16, device, hidden=128) for _ in range(2))
    norm_weight, out = torch.ones(128, dtype=torch.bfloat16, device=device), torch.empty_like(x)
    scratch = MoeScratch(moe, 128, num_tokens, x.dtype, device)
    block = MoeBlock(moe, weights, experts_by({}, {}, device, x.dtype, kernel="few_experts" if path == "few" else None))
    normed = torch.empty_like(x)  # not while capturing: memcheck wants an allocator that cannot

    def layers() -> None:
        out.copy_(residual)
        normed.copy_(x)
        for _ in range(2):
            following = NextNorm(norm_weight, normed, eps=1e-5)
            block.forward(normed, out, scratch, residual=out, next_norm=following)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for seed in (1, 2, 3):
        x.copy_(inputs(num_tokens + seed, torch.bfloat16, device, hidden=128)[:num_tokens])
        with plain_launches(device):
            layers()
        expected = out.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_against_transformers(path: str, normalise: bool, device: str) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=normalise,
        hidden_act="silu",
    )
    theirs = Qwen3MoeSparseMoeBlock(config)
    moe = MoeSpec(8, 3, 32, normalise_weights=normalise)
    weights = weights_of(moe, torch.float32, device)
    with torch.no_grad():
        theirs.gate.weight.copy_(weights.router)
        theirs.experts.gate_up_proj.copy_(weights.gate_up.weight)
        theirs.experts.down_proj.copy_(weights.down.weight)
        x = inputs(11, torch.float32, device)
        expected = theirs.to(device)(x[None])[0]
    assert_close(run(moe, weights, x, choices(path, x.dtype, device)), expected)


def test_every_kernel_a_step_may_need_is_compiled_at_start(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every kernel that rows sorted by expert are multiplied by, on any card."""
    launched = set()

    def record(*arguments: Any, tile: Any, gated: str | None, **options: Any) -> None:
        launched.add((tile, gated is not None))

    for name in ("grouped_matmul", "hopper_grouped_matmul", "packed_experts_product"):
        monkeypatch.setattr(module, name, record)
    for card, spec, hidden in (
        (H200, MoeSpec(128, 8, 768), 2048),
        (H200, MoeSpec(8, 2, 14336), 4096),
        (H200, MoeSpec(60, 4, 1408), 2048),
        (H200, MoeSpec(300, 4, 1000), 72),
        (replace(H200, name="A100", has_hopper_kernels=False), MoeSpec(128, 8, 768), 2048),
    ):
        launched.clear()
        weights = empty_experts(spec, hidden, torch.bfloat16, "meta")
        for matrix in (weights.gate_up, weights.down):
            if card.has_hopper_kernels and spec.num_experts <= MAX_PACKED_EXPERTS:
                matrix.make_room_for_packed()
        by = Choices(table_for("nvidia-h200"), card)
        MoeBlock(spec, weights, by).prepare(MoeScratch(spec, hidden, 1, torch.bfloat16, "meta"))
        for matrix in (weights.gate_up, weights.down):
            chosen = {
                by.of(matrix.product, num_rows, matrix.form_names).tile
                for num_rows in (*range(1, 6000), *range(6000, 200_000, 997))
            }
            grouped = {tile for tile in chosen if not isinstance(tile, FewTile)}
            assert grouped == {tile for tile, gated in launched if gated == matrix.product.is_gated}
