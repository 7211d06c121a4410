"""Routing and sorting alone: the choice against torch's topk, the order against a stable sort."""

from __future__ import annotations

import pytest
import torch

from twostroke.backends.cuda.kernels import moe_routing
from twostroke.backends.cuda.kernels.moe_grouped import most_tiles
from twostroke.backends.cuda.kernels.moe_routing import route, router_logits, sort_by_expert

EXPERTS, TOP_K = 10, 3


def integers(device: str, *shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("num_tokens", [1, 16, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits(num_tokens: int, dtype: torch.dtype, device: str) -> None:
    x, router = (torch.randn(rows, 40, device=device).to(dtype) for rows in (num_tokens, EXPERTS))
    logits = torch.empty(num_tokens, EXPERTS, device=device)
    router_logits(x, router, logits)
    torch.testing.assert_close(logits, x.float() @ router.float().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 8, 19])
def test_the_likeliest_experts_and_their_shares(num_tokens: int, normalise: bool, device: str) -> None:
    logits = 3 * torch.randn(num_tokens, EXPERTS, device=device)
    chosen, shares = integers(device, num_tokens, TOP_K), torch.empty(num_tokens, TOP_K, device=device)
    route(logits, chosen, shares, normalise=normalise)
    expected, ids = torch.softmax(logits, -1).topk(TOP_K, -1)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert chosen.tolist() == ids.tolist()
    torch.testing.assert_close(shares, expected)


@pytest.mark.parametrize("num_tokens", [1, 7, 200, 1000])
@pytest.mark.parametrize("lopsided", [False, True])
def test_the_order_is_that_of_a_stable_sort(
    num_tokens: int, lopsided: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, and in more of them than one."""
    monkeypatch.setattr(moe_routing, "SORT_PAIRS", (32, 1024))
    logits = torch.randn(num_tokens, EXPERTS, device=device)
    if lopsided:
        logits[:, 4:6] += 100
    chosen = logits.topk(TOP_K, -1).indices.int()
    starts = integers(device, EXPERTS + 1)
    sorted_pairs, rows = integers(device, num_tokens * TOP_K), integers(device, num_tokens, TOP_K)
    sort_by_expert(chosen, starts, sorted_pairs, rows)
    expert_of_pair = chosen.flatten()
    expected = torch.sort(expert_of_pair, stable=True).indices
    assert sorted_pairs.tolist() == expected.tolist()
    assert sorted_pairs[rows.flatten().long()].tolist() == list(range(num_tokens * TOP_K))
    per_expert = torch.bincount(expert_of_pair.long(), minlength=EXPERTS)
    assert starts.tolist() == [0, *torch.cumsum(per_expert, 0).tolist()]
    for tile_rows in (4, 16):
        tiles = sum(-(-count // tile_rows) for count in per_expert.tolist())
        assert tiles <= most_tiles(num_tokens * TOP_K, EXPERTS, tile_rows)
