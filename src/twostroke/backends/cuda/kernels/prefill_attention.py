"""Prefill attention over the paged cache in plain Triton, for any card and head size: segments of any length behind
prefixes of any length, causal, with sliding window and soft cap. A tile holds all query heads of a KV head for a few
tokens, so keys are read once a group; where tiles are few, several programs share the keys of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.attention_math import (
    beside_sinks,
    capped,
    join_parts,
    load_keys_and_values,
    load_scales,
)
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring, WalkConfig
from twostroke.backends.cuda.kernels.prefill_tiles import (
    HIGH_TILE,
    ITEM_FIELDS,
    LOW_TILE,
    PrefillScratch,
    PrefillWork,
    Tiling,
)
from twostroke.backends.cuda.kernels.target import Target, target_of

NAME = "plain Triton"
LOWEST = tl.constexpr(-1.0e30)
"""The peak of a query that has seen no key yet: finite, so that a wholly masked block weighs nothing and is no NaN."""
FIELDS = tl.constexpr(ITEM_FIELDS)
JOINED_ROWS = tl.constexpr(8)
JOINED_PARTS = tl.constexpr(8)


def declines(shape: AttentionShape, target: Target) -> str | None:
    """It takes everything."""
    return None


def tiling(shape: AttentionShape, num_tokens: int, num_sms: int) -> Tiling:
    """Low tiles, unless high ones still fill the device and their sums the registers do not."""
    is_low = num_tokens * shape.heads < 2 * HIGH_TILE * num_sms or shape.head_dim > 128
    return Tiling(LOW_TILE if is_low else HIGH_TILE, shape.group, shape.kv_heads, 2 * num_sms)


def prefill_config(tile_rows: int, head_dim: int, target: Target, *, window: int | None) -> WalkConfig:
    facts = {"head_dim": head_dim, "tile_rows": tile_rows, "window": window or 0}
    return WalkConfig(**settings_for("plain prefill", target.name, **facts, **target.room))


@triton.jit
def _walk(
    peak, total, value_sum, query, position, k_head, v_head, k_scales, v_scales, kv_head, table_row, begin, end, oldest,
    last, factor, cap_factor, window, SHAPE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks `begin..end`; only masked blocks look at positions."""
    key = tl.arange(0, BLOCK)
    for block in tl.range(begin, end, num_stages=STAGES):
        at = block * BLOCK + key
        own = at
        if MASKED:
            # What no query of the tile may read is another sequence's or nobody's, and may be NaN: the nearest that one
            # may read is read again.
            own = tl.minimum(tl.maximum(at, oldest), last)
        if SHAPE.page >= BLOCK:
            page = tl.load(table_row + block * BLOCK // SHAPE.page).to(tl.int64)
        else:
            page = tl.load(table_row + own // SHAPE.page).to(tl.int64)
        slot = own % SHAPE.page
        offsets = (page * SHAPE.page_elements + slot * SHAPE.head_dim)[:, None]
        keys, values = load_keys_and_values(k_head, v_head, offsets, SHAPE)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=SHAPE.precision)  # [tile rows, BLOCK]
        if k_scales is not None:
            scores *= load_scales(k_scales, kv_head, page, slot, SHAPE)[None, :]
        scores = capped(scores, cap_factor) * factor
        if MASKED:
            seen = at[None, :] <= (position[:, None] if CAUSAL else last)
            if window is not None:
                seen = seen & (at[None, :] > position[:, None] - window)
                if not CAUSAL:
                    seen = seen & (at[None, :] < position[:, None] + window)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 1)
        value_sum *= decay[:, None]
        if v_scales is not None:
            weights *= load_scales(v_scales, kv_head, page, slot, SHAPE)[None, :]
        value_sum = tl.dot(weights.to(query.dtype), values.to(query.dtype), value_sum, input_precision=SHAPE.precision)
        peak = new_peak
    return peak, total, value_sum


@triton.jit(do_not_specialize=["window", "table_stride"])
def _prefill_kernel(
    queries, k_cache, v_cache, k_scales, v_scales, table, items, out, partials, log_sums, sinks, factor, cap_factor,
    window, query_stride, table_stride, SHAPE: tl.constexpr, CONFIG: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """`window`, `cap_factor` and scales None: there are none."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    own = items + item * FIELDS
    tokens = tl.load(own + 2)
    if tokens == 0:
        return
    table_row = table + tl.load(own).to(tl.int64) * table_stride
    first_token, base, part, parts = tl.load(own + 1), tl.load(own + 3), tl.load(own + 5), tl.load(own + 6)
    WIDTH: tl.constexpr = SHAPE.width
    row = tl.arange(0, TILE)
    dim = tl.arange(0, WIDTH)
    row_held = row < tokens * SHAPE.group
    held = row_held[:, None] & (dim < SHAPE.head_dim)[None, :]
    at = (first_token + row // SHAPE.group).to(tl.int64)
    own_heads = (kv_head * SHAPE.group + row % SHAPE.group)[:, None] * SHAPE.head_dim + dim[None, :]
    query = tl.load(queries + at[:, None] * query_stride + own_heads, mask=held, other=0.0)

    # The tile's queries stand at positions base..last. Blocks of keys from clear to full hold only keys that all of
    # them read; those before and after are cut by the window and by the diagonal.
    last = base + tokens - 1
    full = (base + 1) // CONFIG.block
    if not CAUSAL:  # of all keys of the segment, which end behind the tile
        end_of_all = tl.load(own + 4)
        last, full = end_of_all - 1, end_of_all // CONFIG.block
        if window is not None:
            last = tl.minimum(last, base + tokens + window - 2)
            full = tl.minimum(full, (base + window) // CONFIG.block)
    high = last // CONFIG.block + 1
    oldest, low, clear = 0, 0, 0
    if window is not None:
        oldest = tl.maximum(base - window + 1, 0)
        low = oldest // CONFIG.block
        clear = tl.cdiv(tl.maximum(base + tokens - window, 0), CONFIG.block)
    begin = low + (high - low) * part // parts
    end = low + (high - low) * (part + 1) // parts
    clear = tl.minimum(tl.maximum(clear, begin), end)
    full = tl.minimum(tl.maximum(full, clear), end)

    position = base + row // SHAPE.group
    k_head = k_cache + kv_head * SHAPE.head_elements + dim[None, :]
    v_head = v_cache + kv_head * SHAPE.head_elements + dim[None, :]
    peak = tl.full([TILE], LOWEST, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    value_sum = tl.zeros([TILE, WIDTH], tl.float32)
    if window is not None:
        peak, total, value_sum = _walk(
            peak, total, value_sum, query, position, k_head, v_head, k_scales, v_scales, kv_head, table_row,
            begin, clear, oldest, last, factor, cap_factor, window, SHAPE, CONFIG.block, 1, True, CAUSAL,
        )  # fmt: skip
    peak, total, value_sum = _walk(
        peak, total, value_sum, query, position, k_head, v_head, k_scales, v_scales, kv_head, table_row,
        clear, full, oldest, last, factor, cap_factor, window, SHAPE, CONFIG.block, CONFIG.stages, False, CAUSAL,
    )  # fmt: skip
    peak, total, value_sum = _walk(
        peak, total, value_sum, query, position, k_head, v_head, k_scales, v_scales, kv_head, table_row,
        full, end, oldest, last, factor, cap_factor, window, SHAPE, CONFIG.block, 1, True, CAUSAL,
    )  # fmt: skip
    mean = value_sum / tl.where(total == 0.0, 1.0, total)[:, None]
    if parts == 1:
        mean = beside_sinks(mean, peak + tl.log2(total), sinks, kv_head * SHAPE.group + row % SHAPE.group, row_held)
        out_rows = out + at[:, None] * (SHAPE.kv_heads * SHAPE.elements)
        tl.store(out_rows + own_heads, mean.to(out.dtype.element_ty), mask=held)
    else:
        slot = (tl.load(own + 7) * SHAPE.kv_heads + kv_head).to(tl.int64) * TILE + row
        tl.store(partials + slot[:, None] * SHAPE.head_dim + dim[None, :], mean, mask=held)
        tl.store(log_sums + slot, peak + tl.log2(total), mask=row_held)


@triton.jit
def _join_kernel(partials, log_sums, sinks, items, out, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Joins the parts of cut tiles; a tile's rows are shared out among as many programs as it has parts."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    own = items + item * FIELDS
    first_token, tokens, part, parts = tl.load(own + 1), tl.load(own + 2), tl.load(own + 5), tl.load(own + 6)
    if parts < 2:
        return
    first_place = tl.load(own + 7) - part
    WIDTH: tl.constexpr = SHAPE.width
    dim = tl.arange(0, WIDTH)
    dim_held = dim < SHAPE.head_dim
    held_rows = tokens * SHAPE.group
    for first_row in tl.range(part * JOINED_ROWS, held_rows, parts * JOINED_ROWS, num_stages=1):
        row = first_row + tl.arange(0, JOINED_ROWS)
        row_held = row < held_rows
        peak = tl.full([JOINED_ROWS], LOWEST, tl.float32)
        total = tl.zeros([JOINED_ROWS], tl.float32)
        value_sum = tl.zeros([JOINED_ROWS, WIDTH], tl.float32)
        for first_part in tl.range(0, parts, JOINED_PARTS, num_stages=1):
            index = first_part + tl.arange(0, JOINED_PARTS)
            slot = ((first_place + index) * SHAPE.kv_heads + kv_head).to(tl.int64)[:, None] * TILE + row[None, :]
            slot_held = (index < parts)[:, None] & row_held[None, :]
            log_sum = tl.load(log_sums + slot, mask=slot_held, other=float("-inf"))
            mean = tl.load(
                partials + slot[:, :, None] * SHAPE.head_dim + dim[None, None, :],
                mask=slot_held[:, :, None] & dim_held[None, None, :],
                other=0.0,
            )
            peak, total, value_sum = join_parts(peak, total, value_sum, log_sum, mean)
        at = (first_token + row // SHAPE.group).to(tl.int64) * SHAPE.kv_heads + kv_head
        own_rows = (at * SHAPE.group + row % SHAPE.group)[:, None] * SHAPE.head_dim
        result = value_sum / tl.where(total == 0.0, 1.0, total)[:, None]
        head = kv_head * SHAPE.group + row % SHAPE.group
        result = beside_sinks(result, peak + tl.log2(total), sinks, head, row_held)
        held = row_held[:, None] & dim_held[None, :]
        tl.store(out + own_rows + dim[None, :], result.to(out.dtype.element_ty), mask=held)


def join_tiles(
    work: PrefillWork, scratch: PrefillScratch, out: torch.Tensor, shape: AttentionShape, sinks: torch.Tensor | None
) -> None:
    """The second launch, after any kernel that left parts of tiles in the scratch."""
    if work.part_items:
        launcher(_join_kernel, (len(work.items), shape.kv_heads))(
            scratch.partials, scratch.log_sums, sinks, work.items, out, SHAPE=shape, TILE=work.tile_rows, num_warps=4
        )


def attend(
    queries: torch.Tensor, kv: PagedKV, work: PrefillWork, out: torch.Tensor, scoring: Scoring, scratch: PrefillScratch,
    *, config: WalkConfig | None = None,
) -> None:  # fmt: skip
    """See `PrefillKernel`."""
    shape = kv.shape_for(queries)
    scratch.check(work, shape)
    config = config or prefill_config(work.tile_rows, shape.head_dim, target_of(queries.device), window=scoring.window)
    launcher(_prefill_kernel, (shape.kv_heads, len(work.items)))(
        queries, kv.keys, kv.values, kv.key_scales, kv.value_scales, kv.table, work.items, out, scratch.partials,
        scratch.log_sums, scoring.sinks, scoring.factor, scoring.cap_factor, scoring.window, queries.stride(0),
        kv.table.stride(0), SHAPE=shape, CONFIG=config, TILE=work.tile_rows, CAUSAL=scoring.is_causal,
        num_warps=config.warps,
    )  # fmt: skip
    join_tiles(work, scratch, out, shape, scoring.sinks)
