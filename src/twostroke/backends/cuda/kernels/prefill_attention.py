"""Prefill attention over the paged cache in plain Triton: segments of any length behind prefixes of any length, causal,
with sliding window and soft cap. A tile holds all query heads of a KV head for a few tokens, so keys are read once a
group; where tiles are few, several programs share the keys of one. Does not know layers or who wrote the keys."""

# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.prefill_tiles import ITEM_FIELDS, PrefillScratch, PrefillWork
from twostroke.backends.cuda.kernels.scores import cap_scores, score_factors
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

LOWEST = tl.constexpr(-1.0e30)
"""The peak of a query that has seen no key yet: finite, so that a wholly masked block weighs nothing and is no NaN."""
FIELDS = tl.constexpr(ITEM_FIELDS)
COMBINE_ROWS = 8
COMBINE_PARTS = 8


@dataclass(frozen=True)
class PrefillConfig:
    """How one program walks its keys; the height of its tile comes with the work."""

    block: int
    warps: int
    stages: int


def tile_rows_for(max_count: int, group: int, head_dim: int) -> int:
    """The tile height, in query heads times tokens, that suits a step whose longest segment has `max_count` tokens."""
    return 128 if max_count * group > 64 and head_dim <= 128 else 64


def prefill_config(tile_rows: int, head_dim: int) -> PrefillConfig:
    """The configuration for a tile height; `bench/cuda/attention.py` measures the alternatives."""
    if head_dim > 128:
        return PrefillConfig(block=32, warps=4, stages=2)
    return PrefillConfig(block=64, warps=8 if tile_rows >= 128 else 4, stages=3)


@triton.jit
def _walk(
    peak,
    total,
    value_sum,
    query,
    position,
    k_head,
    v_head,
    table_row,
    begin,
    end,
    oldest,
    last,
    score_scale,
    cap_log2,
    window,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Online softmax over the key blocks `begin..end`; only masked blocks look at positions."""
    key = tl.arange(0, BLOCK)
    dim_held = tl.arange(0, DIM) < HEAD_DIM
    PAGE_ELEMENTS: tl.constexpr = KV_HEADS * PAGE * HEAD_DIM
    for block in tl.range(begin, end, num_stages=STAGES):
        start = block * BLOCK
        at = start + key
        # What no query of the tile may read is another sequence's or nobody's: it may be NaN, and is not loaded.
        readable = (at >= oldest) & (at <= last)
        if PAGE >= BLOCK:
            page = tl.load(table_row + start // PAGE).to(tl.int64)
            offsets = page * PAGE_ELEMENTS + (start % PAGE + key) * HEAD_DIM
        elif MASKED:
            page = tl.load(table_row + at // PAGE, mask=readable, other=0).to(tl.int64)
            offsets = page * PAGE_ELEMENTS + (at % PAGE) * HEAD_DIM
        else:
            page = tl.load(table_row + at // PAGE).to(tl.int64)
            offsets = page * PAGE_ELEMENTS + (at % PAGE) * HEAD_DIM
        if MASKED:
            held = readable[:, None] & dim_held[None, :]
            keys = tl.load(k_head + offsets[:, None], mask=held, other=0.0)  # [BLOCK, DIM]
            values = tl.load(v_head + offsets[:, None], mask=held, other=0.0)
        elif HEAD_DIM == DIM:
            keys = tl.load(k_head + offsets[:, None])
            values = tl.load(v_head + offsets[:, None])
        else:
            keys = tl.load(k_head + offsets[:, None], mask=dim_held[None, :], other=0.0)
            values = tl.load(v_head + offsets[:, None], mask=dim_held[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION)  # [TILE, BLOCK]
        scores = cap_scores(scores, score_scale, cap_log2, HAS_SOFTCAP)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (at[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        value_sum = tl.dot(weights.to(values.dtype), values, value_sum * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    return peak, total, value_sum


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill_kernel(
    queries,
    k_cache,
    v_cache,
    table,
    items,
    out,
    partials,
    log_sums,
    score_scale,
    cap_log2,
    window,
    query_stride,
    table_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    own = items + item * FIELDS
    tokens = tl.load(own + 2)
    if tokens == 0:
        return
    table_row = table + tl.load(own).to(tl.int64) * table_stride
    first_token, base, part, parts = tl.load(own + 1), tl.load(own + 3), tl.load(own + 5), tl.load(own + 6)
    row = tl.arange(0, TILE)
    dim = tl.arange(0, DIM)
    row_held = row < tokens * GROUP
    held = row_held[:, None] & (dim < HEAD_DIM)[None, :]
    at = (first_token + row // GROUP).to(tl.int64)
    own_heads = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
    query = tl.load(queries + at[:, None] * query_stride + own_heads, mask=held, other=0.0)

    # The tile's queries stand at positions base..last. Blocks of keys from clear to full hold only keys that all of
    # them read; those before and after are cut by the window and by the diagonal.
    last = base + tokens - 1
    high = last // BLOCK + 1
    full = (base + 1) // BLOCK
    if HAS_WINDOW:
        oldest = tl.maximum(base - window + 1, 0)
        low = oldest // BLOCK
        clear = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK)
    else:
        oldest = 0
        low = 0
        clear = 0
    begin = low + (high - low) * part // parts
    end = low + (high - low) * (part + 1) // parts
    clear = tl.minimum(tl.maximum(clear, begin), end)
    full = tl.minimum(tl.maximum(full, clear), end)

    position = base + row // GROUP
    k_head = k_cache + kv_head * PAGE * HEAD_DIM + dim[None, :]
    v_head = v_cache + kv_head * PAGE * HEAD_DIM + dim[None, :]
    peak = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    value_sum = tl.zeros([TILE, DIM], tl.float32)
    if HAS_WINDOW:
        peak, total, value_sum = _walk(
            peak, total, value_sum, query, position, k_head, v_head, table_row, begin, clear, oldest, last,
            score_scale, cap_log2, window,
            KV_HEADS, HEAD_DIM, DIM, PAGE, BLOCK, 1, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
        )  # fmt: skip
    peak, total, value_sum = _walk(
        peak, total, value_sum, query, position, k_head, v_head, table_row, clear, full, oldest, last,
        score_scale, cap_log2, window,
        KV_HEADS, HEAD_DIM, DIM, PAGE, BLOCK, STAGES, False, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    peak, total, value_sum = _walk(
        peak, total, value_sum, query, position, k_head, v_head, table_row, full, end, oldest, last,
        score_scale, cap_log2, window,
        KV_HEADS, HEAD_DIM, DIM, PAGE, BLOCK, 1, True, HAS_WINDOW, HAS_SOFTCAP, PRECISION,
    )  # fmt: skip
    mean = value_sum / tl.where(total == 0.0, 1.0, total)[:, None]
    if parts == 1:
        out_rows = out + at[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
        tl.store(out_rows + own_heads, mean.to(out.dtype.element_ty), mask=held)
    else:
        slot = (item * KV_HEADS + kv_head).to(tl.int64) * TILE + row
        tl.store(partials + slot[:, None] * HEAD_DIM + dim[None, :], mean, mask=held)
        tl.store(log_sums + slot, peak + tl.log2(total), mask=row_held)


@triton.jit
def _combine_kernel(
    partials,
    log_sums,
    items,
    out,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Joins the parts of cut tiles; a tile's rows are shared out among as many programs as it has parts."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    own = items + item * FIELDS
    first_token, tokens, part, parts = tl.load(own + 1), tl.load(own + 2), tl.load(own + 5), tl.load(own + 6)
    if parts < 2:
        return
    dim = tl.arange(0, DIM)
    held_rows = tokens * GROUP
    for first_row in tl.range(part * ROWS, held_rows, parts * ROWS, num_stages=1):
        row = first_row + tl.arange(0, ROWS)
        row_held = row < held_rows
        held = row_held[:, None] & (dim < HEAD_DIM)[None, :]
        peak = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        value_sum = tl.zeros([ROWS, DIM], tl.float32)
        for first_part in tl.range(0, parts, PARTS, num_stages=1):
            index = first_part + tl.arange(0, PARTS)
            slot = ((item - part + index) * KV_HEADS + kv_head).to(tl.int64)[:, None] * TILE + row[None, :]
            slot_held = (index < parts)[:, None] & row_held[None, :]
            log_sum = tl.load(log_sums + slot, mask=slot_held, other=float("-inf"))
            mean = tl.load(
                partials + slot[:, :, None] * HEAD_DIM + dim[None, None, :],
                mask=slot_held[:, :, None] & (dim < HEAD_DIM)[None, None, :],
                other=0.0,
            )
            new_peak = tl.maximum(peak, tl.max(log_sum, 0))
            decay = tl.exp2(peak - new_peak)
            weights = tl.exp2(log_sum - new_peak[None, :])
            value_sum = value_sum * decay[:, None] + tl.sum(mean * weights[:, :, None], 0)
            total = total * decay + tl.sum(weights, 0)
            peak = new_peak
        at = (first_token + row // GROUP).to(tl.int64)
        own_heads = (kv_head * GROUP + row % GROUP)[:, None] * HEAD_DIM + dim[None, :]
        result = value_sum / tl.where(total == 0.0, 1.0, total)[:, None]
        out_rows = out + at[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
        tl.store(out_rows + own_heads, result.to(out.dtype.element_ty), mask=held)


def combine_parts(
    work: PrefillWork, scratch: PrefillScratch, out: torch.Tensor, kv_heads: int, group: int, head_dim: int
) -> None:
    """The second launch, after any kernel that left parts of tiles in the scratch."""
    launcher(_combine_kernel, (work.part_items, kv_heads))(
        scratch.partials,
        scratch.log_sums,
        work.items,
        out,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=max(16, next_power_of_2(head_dim)),
        TILE=work.tile_rows,
        ROWS=COMBINE_ROWS,
        PARTS=COMBINE_PARTS,
        num_warps=4,
    )


def check_shapes(
    queries: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work: PrefillWork,
    scratch: PrefillScratch,
) -> tuple[int, int, int, int]:
    """KV heads, group, head size and page size; raises where a kernel would read or write amiss."""
    _, heads, head_dim = queries.shape
    _, kv_heads, page, _ = k_cache.shape
    group = heads // kv_heads
    if group > work.tile_rows:
        raise ValueError(f"A tile of {work.tile_rows} rows cannot hold a group of {group} heads.")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and queries.stride(1) == head_dim):
        raise ValueError("Prefill attention wants contiguous caches and contiguous heads of a token.")
    if work.part_items * work.tile_rows > scratch.max_items * scratch.tile_rows:
        raise ValueError(
            f"Prefill scratch for {scratch.max_items} parts of {scratch.tile_rows} rows cannot hold "
            f"{work.part_items} of {work.tile_rows}."
        )
    return kv_heads, group, head_dim, page


def attend_prefill(
    queries: torch.Tensor,  # [num_tokens, heads, head_dim], any token stride
    k_cache: torch.Tensor,  # [num_blocks + 1, kv_heads, block_size, head_dim], contiguous
    v_cache: torch.Tensor,
    table: torch.Tensor,  # int32 [num_rows, table_len]
    work: PrefillWork,
    out: torch.Tensor,  # [num_tokens, heads * head_dim], contiguous
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    scratch: PrefillScratch,
    config: PrefillConfig | None = None,
) -> None:
    """Query i of a segment stands at position `start + i` and reads every key of its row up to there, the segment's own
    included: they are in the cache already."""
    kv_heads, group, head_dim, page = check_shapes(queries, k_cache, v_cache, work, scratch)
    config = config or prefill_config(work.tile_rows, head_dim)
    score_scale, cap_log2 = score_factors(scale, softcap)
    launcher(_prefill_kernel, (kv_heads, len(work.items)))(
        queries,
        k_cache,
        v_cache,
        table,
        work.items,
        out,
        scratch.partials,
        scratch.log_sums,
        score_scale,
        cap_log2,
        window or 0,
        queries.stride(0),
        table.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=max(16, next_power_of_2(head_dim)),
        PAGE=page,
        TILE=work.tile_rows,
        BLOCK=config.block,
        STAGES=config.stages,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=config.warps,
    )
    if work.part_items:
        combine_parts(work, scratch, out, kv_heads, group, head_dim)
