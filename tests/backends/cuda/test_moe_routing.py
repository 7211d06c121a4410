"""Routing and sorting alone, whatever the tile: experts and shares against torch, the order against a stable sort."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from twostroke.backends.cuda.kernels.moe_decode import router_logits
from twostroke.backends.cuda.kernels.moe_grouped import most_tiles
from twostroke.backends.cuda.kernels.moe_routing import (
    Order,
    RoutingScratch,
    RoutingTile,
    choose_tile,
    route,
)

EXPERTS, TOP_K, HIDDEN = 10, 3, 40
MANY = RoutingTile(64, 1, depth=64)


@dataclass(frozen=True)
class Routed:
    shares: torch.Tensor
    starts: torch.Tensor
    sorted_pairs: torch.Tensor
    rows: torch.Tensor


def routed(
    x: torch.Tensor,
    router: torch.Tensor,
    top_k: int,
    *,
    normalise: bool = True,
    tile: RoutingTile | None = None,
    scratch: RoutingScratch | None = None,
) -> Routed:
    num_tokens, num_experts = len(x), len(router)

    def integers(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=x.device)

    shares = torch.full((num_tokens, top_k), float("nan"), device=x.device)
    found = Routed(shares, integers(num_experts + 1), integers(num_tokens * top_k), integers(num_tokens, top_k))
    scratch = scratch or RoutingScratch(num_experts, num_tokens, x.device)
    order = Order(found.sorted_pairs, found.starts, top_k)
    route(x, router, scratch, shares, order, found.rows, normalise=normalise, tile=tile)
    return found


def experts_by_likelihood(logits: torch.Tensor) -> torch.Tensor:
    """Of equals the lower first; what is not a number last."""
    ranked = torch.where(logits.isnan(), float("-inf"), logits)
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices


def assert_order(found: Routed, chosen: torch.Tensor, num_experts: int) -> None:
    expert_of_pair = chosen.flatten()
    assert found.sorted_pairs.tolist() == torch.sort(expert_of_pair, stable=True).indices.tolist()
    assert found.sorted_pairs[found.rows.flatten().long()].tolist() == list(range(len(expert_of_pair)))
    per_expert = torch.bincount(expert_of_pair, minlength=num_experts)
    assert found.starts.tolist() == [0, *torch.cumsum(per_expert, 0).tolist()]


def assert_routed(found: Routed, logits: torch.Tensor, top_k: int, normalise: bool = True) -> None:
    chosen = experts_by_likelihood(logits)[:, :top_k]
    assert_order(found, chosen, logits.shape[1])
    expected = torch.softmax(logits, -1).gather(-1, chosen)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(found.shares, expected, rtol=1e-4, atol=1e-5)


def whole_numbers(num_tokens: int, num_experts: int, device: str, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """Whose products are exact in any order of summation, so that equals are equal: and there are many of those."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randint(-1, 2, (num_tokens, hidden), generator=generator).float().to(device)
    router = torch.randint(-1, 2, (num_experts, hidden), generator=generator).float().to(device)
    return x, router, x @ router.T


@pytest.mark.parametrize("num_tokens", [1, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x, router = (torch.randn(rows, HIDDEN, device=device).to(dtype) for rows in (num_tokens, EXPERTS))
    logits = torch.empty(num_tokens, EXPERTS, device=device)
    router_logits(x, router, logits)
    torch.testing.assert_close(logits, x.float() @ router.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_likeliest_experts_and_their_shares(dtype: torch.dtype, normalise: bool, device: str) -> None:
    x = (torch.randn(19, HIDDEN, device=device) / 2).to(dtype)
    router = torch.randn(EXPERTS, HIDDEN, device=device).to(dtype)
    found = routed(x, router, TOP_K, normalise=normalise)
    assert_routed(found, x.float() @ router.float().T, TOP_K, normalise)


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 40, 257, 700])
def test_with_equals_and_any_number_of_tokens(num_tokens: int, device: str) -> None:
    x, router, logits = whole_numbers(num_tokens, EXPERTS, device)
    assert_routed(routed(x, router, TOP_K), logits, TOP_K)


@pytest.mark.parametrize("tile", [None, MANY, RoutingTile(64, 2, depth=16), RoutingTile(16, 1, depth=32)])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (8, 8), (20, 5), (128, 8), (300, 4)])
def test_any_number_of_experts(num_experts: int, top_k: int, tile: RoutingTile | None, device: str) -> None:
    x, router, logits = whole_numbers(70, num_experts, device)
    assert_routed(routed(x, router, top_k, tile=tile), logits, top_k)


@pytest.mark.parametrize("hidden", [16, 48, 256, 272])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_any_depth_in_parts(parts: int, hidden: int, device: str) -> None:
    """Also where a part is short, or has nothing at all."""
    x, router, logits = whole_numbers(20, EXPERTS, device, hidden)
    assert_routed(routed(x, router, TOP_K, tile=RoutingTile(16, parts, depth=32)), logits, TOP_K)


@pytest.mark.parametrize("tile", [RoutingTile(16, 2, depth=32), MANY])
def test_more_blocks_of_tokens_than_are_counted_at_once(tile: RoutingTile, device: str) -> None:
    num_tokens = 64 * 70 if tile is MANY else 500
    x, router, logits = whole_numbers(num_tokens, EXPERTS, device, hidden=16)
    assert_routed(routed(x, router, TOP_K, tile=tile), logits, TOP_K)


@pytest.mark.parametrize("tile", [None, MANY])
def test_all_to_the_same_experts(tile: RoutingTile | None, device: str) -> None:
    x, router, _ = whole_numbers(100, EXPERTS, device)
    x[:, 0], router[:, 0] = 100, 0
    router[4:6, 0] = 1
    assert_routed(routed(x, router, 2, tile=tile), x @ router.T, 2)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_spoilt_rows_still_go_to_experts_that_exist(device: str) -> None:
    x, router, _ = whole_numbers(20, EXPERTS, device)
    x[3], x[7, 5], x[9, 2] = float("nan"), float("inf"), float("-inf")
    logits = x @ router.T
    assert logits[3].isnan().all()
    assert logits[7].isnan().any()
    found = routed(x, router, TOP_K)
    assert_order(found, experts_by_likelihood(logits)[:, :TOP_K], EXPERTS)
    assert found.shares[3].isnan().all()
    sound = [row for row in range(20) if row not in (3, 7, 9)]
    assert found.shares[sound].isfinite().all()


def test_scratch_serves_one_batch_after_another(device: str) -> None:
    """Whatever the batch before has left there."""
    scratch = RoutingScratch(EXPERTS, 100, device)
    for num_tokens in (100, 5, 40, 1):
        x, router, logits = whole_numbers(num_tokens, EXPERTS, device)
        assert_routed(routed(x, router, TOP_K, scratch=scratch), logits, TOP_K)
    assert not scratch.arrivals.any()


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 256, 1024, 1025, 2048, 4097, 8192, 20_000])
def test_parts_only_where_blocks_of_tokens_leave_the_device_idle(num_tokens: int) -> None:
    tile = choose_tile(num_tokens)
    blocks = -(-num_tokens // tile.tokens)
    assert tile.parts == 1 or blocks * tile.parts <= 128
    assert blocks * tile.parts > 64 or tile.parts == 8 or blocks * tile.parts * 2 > 128


def test_more_programs_than_have_room_are_refused(device: str) -> None:
    x, router, _ = whole_numbers(300, EXPERTS, device)
    with pytest.raises(ValueError, match="more than 128 programs"):
        routed(x, router, TOP_K, tile=RoutingTile(16, 8, depth=32))


def test_tiles_of_rows_never_exceed_their_bound() -> None:
    for num_tokens in (1, 7, 200):
        chosen = torch.randn(num_tokens, EXPERTS).topk(TOP_K, -1).indices
        per_expert = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        for tile_rows in (4, 16):
            tiles = sum(-(-count // tile_rows) for count in per_expert)
            assert tiles <= most_tiles(num_tokens * TOP_K, EXPERTS, tile_rows)
