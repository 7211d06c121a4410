"""Routing as it was: a kernel each for the router's product, for the choice and for the sort. What `moe_routing.py` is
timed and checked against."""

# ruff: noqa: N803, SIM108  (compile-time constants are in capitals; Triton wants its branches in full)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.gemv import prefetch_to_l2
from twostroke.backends.cuda.kernels.moe_routing import dot, dot_precision, ranks_of_experts
from twostroke.backends.cuda.kernels.target import launch_options

SORT_PAIRS = (512, 2048, 8192)
"""Pairs of a token and an expert that a program of `sort_by_expert` takes at a time: the least that is enough."""


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x, router, logits, num_tokens, hidden: tl.constexpr, experts: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    ids = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    if PDL:
        gdc_launch_dependents()
        # Nobody's result, and pushed out of L2 by the last layer's experts.
        prefetch_to_l2(router + tl.minimum(ids, experts - 1)[:, None] * hidden, hidden)
        gdc_wait()
    sums = tl.zeros([BLOCK_TOKENS, BLOCK_EXPERTS], tl.float32)
    for start in range(0, hidden, BLOCK_DEPTH):
        depth = start + tl.arange(0, BLOCK_DEPTH)
        rows = tl.load(
            x + tokens[:, None].to(tl.int64) * hidden + depth[None, :],
            mask=(tokens < num_tokens)[:, None] & (depth < hidden)[None, :],
            other=0.0,
        )
        weights = tl.load(
            router + ids[:, None] * hidden + depth[None, :],
            mask=(ids < experts)[:, None] & (depth < hidden)[None, :],
            other=0.0,
        )
        sums = dot(rows, tl.trans(weights.to(rows.dtype)), sums, PRECISION)
    mask = (tokens < num_tokens)[:, None] & (ids < experts)[None, :]
    tl.store(logits + tokens[:, None] * experts + ids[None, :], sums, mask=mask)


@triton.jit
def _few_logits_kernel(
    x, router, logits, hidden: tl.constexpr, experts: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    depth = tl.arange(0, BLOCK_DEPTH)
    rows = router + ids[:, None] * hidden + depth[None, :]
    is_expert = (ids < experts)[:, None]
    # The router's weights are nobody's result: their first block is on its way while the kernel before still runs.
    weights = tl.load(rows, mask=is_expert & (depth < hidden)[None, :], other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = tl.zeros([BLOCK_EXPERTS, BLOCK_DEPTH], tl.float32)
    for start in tl.static_range(0, hidden, BLOCK_DEPTH):
        values = tl.load(x + token.to(tl.int64) * hidden + start + depth, mask=start + depth < hidden, other=0.0)
        if start > 0:
            weights = tl.load(rows + start, mask=is_expert & (start + depth < hidden)[None, :], other=0.0)
        sums += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    tl.store(logits + token * experts + ids, tl.sum(sums, 1), mask=ids < experts)


@triton.jit
def _route_kernel(
    logits, chosen, shares, experts: tl.constexpr, top_k: tl.constexpr, NORMALISE: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's experts and their shares. All places at once: a loop over the best, one by one, takes longer."""
    token = tl.program_id(0)
    ids = tl.arange(0, EXPERTS_PADDED)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(logits + token * experts + ids, mask=ids < experts, other=float("-inf"))
    ranks = ranks_of_experts(values, ids)
    exponentials = tl.exp(values - tl.max(values, 0))
    is_chosen = ranks < top_k
    if NORMALISE:
        total = tl.sum(tl.where(is_chosen, exponentials, 0.0), 0)
    else:
        total = tl.sum(exponentials, 0)
    slots = token * top_k + ranks
    tl.store(chosen + slots, ids, mask=is_chosen)
    tl.store(shares + slots, exponentials / total, mask=is_chosen)


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    chosen, starts, sorted_pairs, rows, num_pairs, experts: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair is a token and one of its experts. A program: one expert, whose first row is the number of pairs that go
    to experts before it; all count for themselves, so none waits for another."""
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    before = tl.zeros([BLOCK], tl.int32)
    first = 0
    while first < num_pairs:  # not a range: the interpreter makes none of a run-time number
        pairs = first + offsets
        before += (tl.load(chosen + pairs, mask=pairs < num_pairs, other=experts) < expert).to(tl.int32)
        first += BLOCK
    row = tl.sum(before, 0)
    tl.store(starts + expert, row)
    if expert == experts - 1:
        tl.store(starts + experts, num_pairs)
    first = 0
    while first < num_pairs:
        pairs = first + offsets
        is_own = tl.load(chosen + pairs, mask=pairs < num_pairs, other=experts) == expert
        own = is_own.to(tl.int32)
        places = row + tl.cumsum(own, 0) - own
        tl.store(rows + pairs, places, mask=is_own)
        tl.store(sorted_pairs + places, pairs, mask=is_own)
        row += tl.sum(own, 0)
        first += BLOCK


def router_logits(x: torch.Tensor, router: torch.Tensor, logits: torch.Tensor, *, pdl: bool = False) -> None:
    """x [num_tokens, hidden] times router [experts, hidden] -> logits float32 [num_tokens, experts]."""
    num_tokens, hidden = x.shape
    experts = router.shape[0]
    if num_tokens <= 16:
        _few_logits_kernel[(num_tokens, triton.cdiv(experts, 4))](
            x, router, logits, hidden, experts, BLOCK_EXPERTS=4,
            BLOCK_DEPTH=min(1024, triton.next_power_of_2(hidden)), PDL=pdl, num_warps=4, **launch_options(pdl),
        )  # fmt: skip
        return
    block_tokens, block_experts, depth = (16, 16, 256) if num_tokens <= 512 else (64, 64, 128)
    _logits_kernel[(triton.cdiv(num_tokens, block_tokens), triton.cdiv(experts, block_experts))](
        x, router, logits, num_tokens, hidden, experts, BLOCK_TOKENS=block_tokens, BLOCK_EXPERTS=block_experts,
        BLOCK_DEPTH=min(depth, max(16, triton.next_power_of_2(hidden))), PRECISION=dot_precision(x.dtype), PDL=pdl,
        num_warps=4, num_stages=4, **launch_options(pdl),
    )  # fmt: skip


def route(
    logits: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, *, normalise: bool, pdl: bool = False
) -> None:
    """logits float32 [num_tokens, experts] -> chosen int32 and shares float32, both [num_tokens, top_k], the likeliest
    expert first."""
    num_tokens, experts = logits.shape
    padded = triton.next_power_of_2(experts)
    _route_kernel[(num_tokens,)](
        logits, chosen, shares, experts, chosen.shape[1], NORMALISE=normalise, EXPERTS_PADDED=padded, PDL=pdl,
        num_warps=min(max(padded // 32, 4), 16), **launch_options(pdl),
    )  # fmt: skip


def sort_by_expert(
    chosen: torch.Tensor, starts: torch.Tensor, sorted_pairs: torch.Tensor, rows: torch.Tensor, *, pdl: bool = False
) -> None:
    """chosen int32 [num_tokens, top_k] -> starts int32 [experts + 1] (an expert's first row), sorted_pairs int32
    [num_pairs] (the pair of each row) and rows int32 [num_tokens, top_k] (the row of each pair)."""
    num_pairs, experts = chosen.numel(), starts.shape[0] - 1
    block = next((pairs for pairs in SORT_PAIRS if pairs >= num_pairs), SORT_PAIRS[-1])
    _sort_kernel[(experts,)](
        chosen, starts, sorted_pairs, rows, num_pairs, experts, BLOCK=block, PDL=pdl,
        num_warps=8 if block == SORT_PAIRS[-1] else 4, **launch_options(pdl),
    )  # fmt: skip
