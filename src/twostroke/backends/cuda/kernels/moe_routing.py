"""Which experts a token goes to, and where its row stands among the rows sorted by expert. The order is stable: by
expert, then by token; no atomics, so the same tokens always give the same order. Knows no expert's weights."""

# ruff: noqa: N803  (compile-time constants are in capitals)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PLAN_CHUNKS = 32
"""Chunks of tokens that the one program of `plan` takes at a time."""
_SCATTER_PAIRS = 256


@triton.jit
def ranks_of_experts(logits, ids):
    """[experts] -> the place of each expert when the likeliest comes first and of equals the lower. Counted
    rather than sorted: a place is the number of experts before it. What is not a number comes last, so that a spoilt
    row still goes to experts that exist."""
    logits = tl.where(logits == logits, logits, float("-inf"))
    others, own = logits[:, None], logits[None, :]  # summed over the slower axis: mostly within a thread
    before = (others > own) | ((others == own) & (ids[:, None] < ids[None, :]))
    return tl.sum(before.to(tl.int32), 0)


@triton.jit
def dot(left, right, sums, PRECISION: tl.constexpr):
    if PRECISION == "ieee":
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x, router, logits, num_tokens, hidden: tl.constexpr, experts: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    ids = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits, chosen, shares, places, counts, num_tokens, experts: tl.constexpr, top_k: tl.constexpr,
    NORMALISE: tl.constexpr, CHUNK: tl.constexpr, EXPERTS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A chunk of tokens: each one's experts and shares, how many tokens of the chunk each expert got (`counts`), and
    how many of them come before this token (`places`)."""
    chunk = tl.program_id(0)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.arange(0, EXPERTS_PADDED)
    is_token = tokens < num_tokens
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    mask = is_token[:, None] & (ids < experts)[None, :]
    values = tl.load(logits + tokens[:, None] * experts + ids[None, :], mask=mask, other=0.0)
    values = tl.where((ids < experts)[None, :], values, float("-inf"))
    # What is not a number is chosen last, so that a spoilt row still goes to experts that exist.
    values = tl.where(values == values, values, float("-inf"))
    exponentials = tl.exp(values - tl.max(values, 1)[:, None])
    slots = tl.full([CHUNK, EXPERTS_PADDED], -1, tl.int32)
    total = tl.zeros([CHUNK], tl.float32)
    for slot in tl.static_range(top_k):
        is_free = (slots < 0) & (ids < experts)[None, :]
        best = tl.max(tl.where(is_free, values, float("-inf")), 1)
        expert = tl.min(tl.where(is_free & (values == best[:, None]), ids[None, :], EXPERTS_PADDED), 1)
        is_chosen = ids[None, :] == expert[:, None]
        slots = tl.where(is_chosen, slot, slots)
        share = tl.sum(tl.where(is_chosen, exponentials, 0.0), 1)
        total += share
        tl.store(chosen + tokens * top_k + slot, expert, mask=is_token)
    if not NORMALISE:
        total = tl.sum(exponentials, 1)
    is_sent = (slots >= 0) & is_token[:, None]
    sent = is_sent.to(tl.int32)
    before = tl.cumsum(sent, 0) - sent
    for slot in tl.static_range(top_k):
        is_chosen = slots == slot
        share = tl.sum(tl.where(is_chosen, exponentials, 0.0), 1) / total
        tl.store(shares + tokens * top_k + slot, share, mask=is_token)
        place = tl.sum(tl.where(is_chosen, before, 0), 1)
        tl.store(places + tokens * top_k + slot, place, mask=is_token)
    tl.store(counts + chunk * experts + ids, tl.sum(sent, 0), mask=ids < experts)


@triton.jit(do_not_specialize=["num_chunks"])
def _plan_kernel(
    counts, starts, tile_ends, num_chunks, experts: tl.constexpr, TILE_TOKENS: tl.constexpr, CHUNKS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program. `counts` become the rows at which each chunk's tokens of each expert begin."""
    ids = tl.arange(0, EXPERTS_PADDED)
    is_expert = ids < experts
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    totals = tl.zeros([EXPERTS_PADDED], tl.int32)
    first = 0
    while first < num_chunks:  # not a range: the interpreter makes none of a run-time number
        chunks = first + tl.arange(0, CHUNKS)
        mask = (chunks < num_chunks)[:, None] & is_expert[None, :]
        totals += tl.sum(tl.load(counts + chunks[:, None] * experts + ids[None, :], mask=mask, other=0), 0)
        first += CHUNKS
    ends = tl.cumsum(totals, 0)
    tl.store(starts, 0)
    tl.store(starts + 1 + ids, ends, mask=is_expert)
    tl.store(tile_ends + ids, tl.cumsum((totals + TILE_TOKENS - 1) // TILE_TOKENS, 0), mask=is_expert)
    running = ends - totals
    first = 0
    while first < num_chunks:
        chunks = first + tl.arange(0, CHUNKS)
        mask = (chunks < num_chunks)[:, None] & is_expert[None, :]
        block = tl.load(counts + chunks[:, None] * experts + ids[None, :], mask=mask, other=0)
        begins = tl.cumsum(block, 0) - block + running[None, :]
        tl.store(counts + chunks[:, None] * experts + ids[None, :], begins, mask=mask)
        running += tl.sum(block, 0)
        first += CHUNKS


@triton.jit(do_not_specialize=["num_pairs"])
def _scatter_kernel(
    chosen, places, begins, sorted_pairs, rows, num_pairs, experts: tl.constexpr, top_k: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A pair is a token and one of its experts. Writes the row of every pair, and the pair of every row."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + pairs, mask=mask, other=0)
    chunk = pairs // (top_k * CHUNK)
    row = tl.load(begins + chunk * experts + expert, mask=mask, other=0) + tl.load(places + pairs, mask=mask, other=0)
    tl.store(rows + pairs, row, mask=mask)
    tl.store(sorted_pairs + row, pairs, mask=mask)


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
    block_tokens, block_experts = (16, 16) if num_tokens <= 512 else (64, 64)
    _logits_kernel[(triton.cdiv(num_tokens, block_tokens), triton.cdiv(experts, block_experts))](
        x, router, logits, num_tokens, hidden, experts, BLOCK_TOKENS=block_tokens, BLOCK_EXPERTS=block_experts,
        BLOCK_DEPTH=min(128, max(16, triton.next_power_of_2(hidden))), PRECISION=dot_precision(x.dtype), PDL=pdl,
        num_warps=4, num_stages=4, **launch_options(pdl),
    )  # fmt: skip


def route(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    *,
    normalise: bool,
    chunk: int,
    pdl: bool = False,
) -> None:
    """logits float32 [num_tokens, experts] -> chosen int32, shares float32 and places int32, each
    [num_tokens, top_k]; counts int32 [chunks, experts]."""
    num_tokens, experts = logits.shape
    _route_kernel[(triton.cdiv(num_tokens, chunk),)](
        logits, chosen, shares, places, counts, num_tokens, experts, chosen.shape[1], NORMALISE=normalise, CHUNK=chunk,
        EXPERTS_PADDED=triton.next_power_of_2(experts), PDL=pdl, num_warps=4 if chunk <= 16 else 8,
        **launch_options(pdl),
    )  # fmt: skip


def sort_by_expert(
    chosen: torch.Tensor,
    places: torch.Tensor,
    counts: torch.Tensor,
    starts: torch.Tensor,
    tile_ends: torch.Tensor,
    sorted_pairs: torch.Tensor,
    rows: torch.Tensor,
    *,
    chunk: int,
    tile_tokens: int,
    pdl: bool = False,
) -> None:
    """From what `route` wrote: starts int32 [experts + 1] (an expert's first row), tile_ends int32 [experts] (tiles of
    `tile_tokens` rows, counted up to and with each expert), sorted_pairs int32 [num_pairs] (the pair of each row) and
    rows int32 [num_tokens, top_k] (the row of each pair)."""
    num_tokens, top_k = chosen.shape
    experts = tile_ends.shape[0]
    _plan_kernel[(1,)](
        counts, starts, tile_ends, triton.cdiv(num_tokens, chunk), experts, TILE_TOKENS=tile_tokens,
        CHUNKS=PLAN_CHUNKS, EXPERTS_PADDED=triton.next_power_of_2(experts), PDL=pdl, num_warps=8,
        **launch_options(pdl),
    )  # fmt: skip
    num_pairs = num_tokens * top_k
    _scatter_kernel[(triton.cdiv(num_pairs, _SCATTER_PAIRS),)](
        chosen, places, counts, sorted_pairs, rows, num_pairs, experts, top_k, CHUNK=chunk, BLOCK=_SCATTER_PAIRS,
        PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip


def launch_options(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}


def dot_precision(dtype: torch.dtype) -> str:
    """Of `dot`: exact for float32, which tests compare closely, and in the interpreter, which cannot multiply bfloat16
    matrices. To 16-bit operands on a device the other means nothing."""
    return "ieee" if dtype == torch.float32 or triton.knobs.runtime.interpret else "tf32"
