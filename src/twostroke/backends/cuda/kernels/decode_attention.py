"""Decode attention over the paged cache: one query token a sequence, all query heads of a KV head in one program, a
batch's keys in work items (`decode_cuts.py`). Does not know layers, steps or who wrote the keys."""

# ruff: noqa: N803, N806, SIM108
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.decode_cuts import (
    ITEM_FIELDS,
    MOST_PROGRAMS_PER_SM,
    DecodeConfig,
    SplitPlan,
    cut_contexts,
    decode_config,
    key_blocks,
    locate,
    most_items,
    split_plan,
)
from twostroke.backends.cuda.kernels.prefetch import prefetch_to_l2
from twostroke.backends.cuda.kernels.scores import cap_scores, score_factors
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

ROWS = tl.constexpr(16)
"""Query heads of a program: a group is padded to what a tensor-core product takes at least."""


class DecodeScratch:
    """Where items of one sequence leave their parts for the last of them; made once, shared by all layers in a row."""

    def __init__(
        self, max_tokens: int, heads: int, kv_heads: int, head_dim: int, device: torch.device | str, num_sms: int
    ) -> None:
        self.max_tokens = max_tokens
        self.num_sms = num_sms
        self.max_items = max_tokens + most_items(kv_heads, num_sms, MOST_PROGRAMS_PER_SM)
        # [max_items, kv_heads, group, head_dim] and [max_items, kv_heads, group]
        self.partials = torch.empty(self.max_items * heads * head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(self.max_items * heads, dtype=torch.float32, device=device)
        # What `cut_contexts` makes of a batch where a call brings nothing of its own.
        self.items = self.new_items()
        # Zero before the first launch; the last item of a sequence sets its own back to zero.
        self.arrivals = torch.zeros(max_tokens * kv_heads, dtype=torch.int32, device=device)

    def new_items(self) -> torch.Tensor:
        """Room for the cuts of one batch: token, number among its items, their number  # int32 [max_items, 4]"""
        return torch.zeros(self.max_items, ITEM_FIELDS, dtype=torch.int32, device=self.partials.device)


@triton.jit(
    do_not_specialize=[
        "window", "num_tokens", "table_stride", "target_items", "fine_items", "long_blocks", "smallest_blocks",
    ]
)  # fmt: skip
def _decode_kernel(
    queries,
    k_cache,
    v_cache,
    table,
    rows,
    positions,
    items,
    out,
    partials,
    log_sums,
    arrivals,
    score_scale,
    cap_log2,
    window,
    num_tokens,
    query_stride,
    table_stride,
    target_items,
    fine_items,
    long_blocks,
    smallest_blocks,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,
    ALONE: tl.constexpr,
    REDUCE_GROUP: tl.constexpr,
    REDUCE_ITEMS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # Where the keys lie was known before the kernel ahead began; only its own token's query and key are waited for.
    if ALONE:
        token, split, splits = locate(
            item, positions, window, target_items, fine_items, long_blocks, smallest_blocks, HAS_WINDOW, BLOCK
        )
    else:
        token = tl.load(items + item * 4)
        split = tl.load(items + item * 4 + 1)
        splits = tl.load(items + item * 4 + 2)
    if token >= num_tokens:
        if PDL:
            gdc_wait()  # a grid of such programs alone would end, and let the next begin, before what it stands behind
        return
    position = tl.load(positions + token)
    first_block, blocks = key_blocks(position, window, HAS_WINDOW, BLOCK)
    begin = (first_block + blocks * split // splits) * BLOCK
    end = tl.minimum((first_block + blocks * (split + 1) // splits) * BLOCK, position + 1)
    oldest = tl.maximum(position - window + 1, 0) if HAS_WINDOW else 0

    head = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    key = tl.arange(0, BLOCK)
    head_held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    own_heads = kv_head * GROUP * HEAD_DIM + head[:, None] * HEAD_DIM + dim[None, :]
    table_row = table + tl.load(rows + token).to(tl.int64) * table_stride
    PAGE_ELEMENTS: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    if PDL:
        for ahead in tl.static_range(AHEAD):
            at = tl.minimum(begin + ahead * BLOCK + key, end - 1)
            if HAS_WINDOW:
                at = tl.maximum(at, oldest)
            _ask_for(at, k_cache, v_cache, table_row, kv_head, PAGE_ELEMENTS, PAGE, HEAD_DIM)
        gdc_wait()
        gdc_launch_dependents()
    query = tl.load(queries + token.to(tl.int64) * query_stride + own_heads, mask=head_held, other=0.0)
    k_head = k_cache + kv_head * PAGE * HEAD_DIM + dim[None, :]
    v_head = v_cache + kv_head * PAGE * HEAD_DIM + dim[None, :]

    # What a score is multiplied by on its way into exp2, in one instruction with what is subtracted.
    to_log2 = 1.0 if HAS_SOFTCAP else score_scale
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if KEYS_FIRST:
        value_sum = tl.zeros([DIM, ROWS], tl.float32)
    else:
        value_sum = tl.zeros([ROWS, DIM], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        at = start + key
        readable = at < end
        if HAS_WINDOW:
            readable = readable & (at >= oldest)
        # What lies outside the context is another sequence's or nobody's, and may be anything: zero times NaN is NaN.
        # So the context's last key is read again, or its first: that takes fewer instructions than a mask.
        own = tl.minimum(key, end - 1 - start)
        if HAS_WINDOW:
            own = tl.maximum(own, oldest - start)
        if PAGE >= BLOCK:
            page = tl.load(table_row + start // PAGE).to(tl.int64)
            first = page * PAGE_ELEMENTS + start % PAGE * HEAD_DIM
            offsets = own * HEAD_DIM
        else:
            page = tl.load(table_row + (start + own) // PAGE).to(tl.int64)
            first = 0
            offsets = page * PAGE_ELEMENTS + (start + own) % PAGE * HEAD_DIM
        if HEAD_DIM == DIM:
            keys = tl.load(k_head + first + offsets[:, None])  # [BLOCK, DIM]
            values = tl.load(v_head + first + offsets[:, None])
        else:
            held = (dim < HEAD_DIM)[None, :]
            keys = tl.load(k_head + first + offsets[:, None], mask=held, other=0.0)
            values = tl.load(v_head + first + offsets[:, None], mask=held, other=0.0)
        if KEYS_FIRST:
            scores = tl.dot(keys, tl.trans(query), input_precision=PRECISION)  # [BLOCK, ROWS]
            if HAS_SOFTCAP:
                scores = cap_scores(scores, score_scale, cap_log2, True)
            scores = tl.where(readable[:, None], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 0))
            weights = tl.exp2(scores * to_log2 - (new_peak * to_log2)[None, :])
            decay = tl.exp2((peak - new_peak) * to_log2)
            total = total * decay + tl.sum(weights, 0)
            value_sum = tl.dot(
                tl.trans(values), weights.to(values.dtype), value_sum * decay[None, :], input_precision=PRECISION
            )
        else:
            scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)  # [ROWS, BLOCK]
            if HAS_SOFTCAP:
                scores = cap_scores(scores, score_scale, cap_log2, True)
            scores = tl.where(readable[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores * to_log2 - (new_peak * to_log2)[:, None])
            decay = tl.exp2((peak - new_peak) * to_log2)
            total = total * decay + tl.sum(weights, 1)
            value_sum = tl.dot(weights.to(values.dtype), values, value_sum * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    if KEYS_FIRST:
        mean = tl.trans(value_sum / total[None, :])
    else:
        mean = value_sum / total[:, None]
    out_token = out + token.to(tl.int64) * (KV_HEADS * GROUP * HEAD_DIM) + kv_head * GROUP * HEAD_DIM
    if splits == 1:
        tl.store(out_token + head[:, None] * HEAD_DIM + dim[None, :], mean.to(out.dtype.element_ty), mask=head_held)
        return

    slot = item.to(tl.int64) * KV_HEADS + kv_head
    tl.store(partials + slot * (GROUP * HEAD_DIM) + head[:, None] * HEAD_DIM + dim[None, :], mean, mask=head_held)
    tl.store(log_sums + slot * GROUP + head, peak * to_log2 + tl.log2(total), mask=head < GROUP)
    # Every thread's part is written before one thread says so, and read only after the last has said so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + token * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        tl.debug_barrier()
        first_slot = (item - split).to(tl.int64) * KV_HEADS + kv_head
        _reduce(
            partials, log_sums, out_token, first_slot, splits,
            GROUP, KV_HEADS, HEAD_DIM, DIM, REDUCE_GROUP, REDUCE_ITEMS,
        )  # fmt: skip
        tl.store(arrivals + token * KV_HEADS + kv_head, 0)


@triton.jit
def _ask_for(
    at, k_cache, v_cache, table_row, kv_head, PAGE_ELEMENTS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Keys and values into L2, while the kernel ahead turns and stores the newest: it leaves the memory idle."""
    page = tl.load(table_row + at // PAGE).to(tl.int64)
    offsets = page * PAGE_ELEMENTS + (kv_head * PAGE + at % PAGE) * HEAD_DIM
    prefetch_to_l2(k_cache + offsets[:, None], HEAD_DIM)
    prefetch_to_l2(v_cache + offsets[:, None], HEAD_DIM)


@triton.jit
def _reduce(
    partials,
    log_sums,
    out_token,
    first_slot,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    REDUCE_GROUP: tl.constexpr,
    REDUCE_ITEMS: tl.constexpr,
):
    """Joins the items of one token and KV head. Past the first-level cache, which may hold what was there before."""
    head = tl.arange(0, REDUCE_GROUP)
    dim = tl.arange(0, DIM)
    head_held = (head < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    own = head[:, None] * HEAD_DIM + dim[None, :]
    peak = tl.full([REDUCE_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([REDUCE_GROUP], tl.float32)
    value_sum = tl.zeros([REDUCE_GROUP, DIM], tl.float32)
    for start in tl.range(0, splits, REDUCE_ITEMS, num_stages=1):
        index = start + tl.arange(0, REDUCE_ITEMS)
        slots = first_slot + index * KV_HEADS
        held = index < splits
        log_sum = tl.load(
            log_sums + slots[:, None] * GROUP + head[None, :],
            mask=held[:, None] & (head < GROUP)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        # Padded heads have no key at all: a finite peak keeps them from infinity minus infinity.
        log_sum = tl.where((head < GROUP)[None, :], log_sum, 0.0)
        part = tl.load(
            partials + slots[:, None, None] * (GROUP * HEAD_DIM) + own[None, :, :],
            mask=held[:, None, None] & head_held[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_peak = tl.maximum(peak, tl.max(log_sum, 0))
        decay = tl.exp2(peak - new_peak)
        weights = tl.exp2(log_sum - new_peak[None, :])
        value_sum = value_sum * decay[:, None] + tl.sum(part * weights[:, :, None], 0)
        total = total * decay + tl.sum(weights, 0)
        peak = new_peak
    tl.store(out_token + own, (value_sum / total[:, None]).to(out_token.dtype.element_ty), mask=head_held)


def attend_decode(
    queries: torch.Tensor,  # [num_tokens, heads, head_dim], any token stride
    k_cache: torch.Tensor,  # [num_blocks + 1, kv_heads, block_size, head_dim], contiguous
    v_cache: torch.Tensor,
    table: torch.Tensor,  # int32 [num_rows, table_len]
    rows: torch.Tensor,  # int32 [num_tokens]
    positions: torch.Tensor,  # int32 [num_tokens]
    out: torch.Tensor,  # [num_tokens, heads * head_dim], contiguous
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scratch: DecodeScratch,
    items: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    plan: SplitPlan | None = None,
) -> None:
    """Token t reads the keys at positions `max(0, p - window + 1)..p` of row `rows[t]`, p being `positions[t]`.
    `items`: what `cut_contexts` made of these positions, with the same window, plan and
    configuration; None: made here."""
    num_tokens, heads, head_dim = queries.shape
    _, kv_heads, page, _ = k_cache.shape
    group = heads // kv_heads
    config = config or decode_config(head_dim, num_tokens, positions.device)
    plan = plan or split_plan(num_tokens, kv_heads, scratch.num_sms)
    if num_tokens > scratch.max_tokens or plan.max_items > scratch.max_items:
        raise ValueError(
            f"Decode scratch for {scratch.max_tokens} tokens ({scratch.max_items} items) cannot hold {num_tokens} "
            f"({plan.max_items})."
        )
    if group > ROWS.value:
        raise ValueError(f"Decode attention takes at most {ROWS.value} query heads a KV head, not {group}.")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and queries.stride(1) == head_dim):
        raise ValueError("Decode attention wants contiguous caches and contiguous heads of a token.")
    were_cut = items is not None
    if items is None:
        items = scratch.items
        cut_contexts(
            positions, items, kv_heads=kv_heads, head_dim=head_dim, num_sms=scratch.num_sms,
            window=window, plan=plan, config=config,
        )  # fmt: skip
    dim = max(16, next_power_of_2(head_dim))
    reduce_group = next_power_of_2(group)
    score_scale, cap_log2 = score_factors(scale, softcap)
    # Programs read their item before they wait: it must be there.
    dependent(_decode_kernel, (kv_heads, plan.max_items), queries.device, ahead=were_cut or num_tokens == 1)(
        queries,
        k_cache,
        v_cache,
        table,
        rows,
        positions,
        items,
        out,
        scratch.partials,
        scratch.log_sums,
        scratch.arrivals,
        score_scale,
        cap_log2,
        window or 0,
        num_tokens,
        queries.stride(0),
        table.stride(0),
        *plan.in_blocks(config.block),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        PAGE=page,
        BLOCK=config.block,
        STAGES=config.stages,
        AHEAD=config.ahead,
        ALONE=num_tokens == 1,
        REDUCE_GROUP=reduce_group,
        # Parts are joined this many at a time: 8192 numbers in registers.
        REDUCE_ITEMS=max(1, min(16, 8192 // (reduce_group * dim))),
        KEYS_FIRST=config.keys_first,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
    )
