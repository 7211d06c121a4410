"""Decode attention over the paged cache: one query token a sequence, or a few at places side by side, all their heads
of a KV head in one program, a batch's keys in work items (`decode_cuts.py`). A token below is a sequence's, with all
its queries. Does not know layers, steps or who wrote the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from twostroke.backends.cuda.kernels.attention_math import (
    beside_sinks,
    capped,
    join_parts,
    load_keys_and_values,
    load_scales,
)
from twostroke.backends.cuda.kernels.decode_cuts import (
    ITEM_FIELDS,
    MOST_PROGRAMS_PER_SM,
    SplitPlan,
    decode_config,
    key_blocks,
    most_items,
    query_span,
    split_plan,
    splits_of,
)
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring, WalkConfig
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import prefetch_to_l2, wait_and_start_next

MAX_GROUP = 16
"""Query heads of a KV head."""
MAX_WARPS = 8
NO_KEYS = tl.constexpr(-1e30)
"""The logarithm of a sum of weights that has none: finite, so that no difference is infinity less infinity."""


class DecodeScratch:
    """Where items of one sequence leave their parts for the last of them; made once, shared by all layers in a row."""

    def __init__(
        self,
        max_tokens: int,
        shape: AttentionShape,
        device: torch.device | str,
        num_sms: int,
        max_queries: int = 1,
    ) -> None:
        """`max_queries`: of all tokens of a batch together, where they have several each; `shape.queries` of one."""
        self.max_tokens = max_tokens
        self.num_sms = num_sms
        whole = most_items(shape.kv_heads, num_sms, MOST_PROGRAMS_PER_SM)
        self.max_items = max_tokens + whole
        # [items, kv_heads, queries, group, head_dim] and [items, kv_heads, queries, group]
        self.max_parts = max(self.max_items, max_queries + whole * shape.queries)
        self.partials = torch.empty(self.max_parts * shape.heads * shape.head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(self.max_parts * shape.heads, dtype=torch.float32, device=device)
        # Zero before the first launch; the last item of a sequence sets its own back to zero.
        self.arrivals = torch.zeros(max_tokens * shape.kv_heads, dtype=torch.int32, device=device)

    def new_items(self) -> torch.Tensor:
        """Room for the cuts of one batch  # int32 [max_items, ITEM_FIELDS]"""
        return torch.zeros(self.max_items, ITEM_FIELDS, dtype=torch.int32, device=self.partials.device)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    queries, k_cache, v_cache, k_scales, v_scales, table, rows, positions, items, out, partials, log_sums, arrivals,
    sinks, factor, cap_factor, window, query_stride, table_stride, FIRST: tl.constexpr, SHAPE: tl.constexpr,
    CONFIG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`items` None: one token, cut here. `window`, `cap_factor` and scales None: there are none."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # Where the keys lie was known before the kernel ahead began; only its own token's query and key are waited for.
    token, split, splits = own_item(item, items, positions, window, SHAPE.queries, CONFIG)
    if token < 0:
        if PDL:
            gdc_wait()  # a grid of such programs alone would end, and let the next begin, before what it stands behind
        return
    position, last = query_span(positions, token, None, SHAPE.queries)
    first_block, blocks = key_blocks(position, last, window, CONFIG.block)
    begin = (first_block + blocks * split // splits) * CONFIG.block
    end = tl.minimum((first_block + blocks * (split + 1) // splits) * CONFIG.block, last + 1)
    oldest = 0
    if window is not None:
        oldest = tl.maximum(position - window + 1, tl.minimum(position, FIRST))
    table_row = table + tl.load(rows + token * SHAPE.queries).to(tl.int64) * table_stride
    if PDL:
        _ask_ahead(k_cache, v_cache, table_row, kv_head, begin, end, oldest, window, SHAPE, CONFIG)
    wait_and_start_next(PDL)

    ROWS: tl.constexpr = SHAPE.walker_rows
    walker = tl.arange(0, ROWS)
    dim = tl.arange(0, SHAPE.width)
    held = (walker < SHAPE.walkers)[:, None] & (dim < SHAPE.head_dim)[None, :]
    number, head = _query_and_head(walker, SHAPE)
    stands = position
    if SHAPE.queries > 1:  # those that are not used read what the first does
        stands = tl.maximum(
            tl.load(positions + token * SHAPE.queries + number, mask=walker < SHAPE.walkers, other=0), position
        )
    own_query = head[:, None] * SHAPE.head_dim + dim[None, :]
    if SHAPE.queries > 1:
        own_query += number[:, None] * query_stride
    first_query = token.to(tl.int64) * SHAPE.queries * query_stride + kv_head * SHAPE.elements
    query = tl.load(queries + first_query + own_query, mask=held, other=0.0)
    mean, log_sum = _attend_keys(
        query, k_cache, v_cache, k_scales, v_scales, table_row, kv_head, begin, end, stands, oldest, factor,
        cap_factor, window, SHAPE, CONFIG,
    )  # fmt: skip
    out_token = out + (token.to(tl.int64) * SHAPE.queries * SHAPE.kv_heads + kv_head) * SHAPE.elements
    if splits == 1:
        mean = beside_sinks(mean, log_sum, sinks, kv_head * SHAPE.group + head, walker < SHAPE.walkers)
        tl.store(out_token + _place_in_out(walker, dim, SHAPE), mean.to(out.dtype.element_ty), mask=held)
        return

    slot = item.to(tl.int64) * SHAPE.kv_heads + kv_head
    own = walker[:, None] * SHAPE.head_dim + dim[None, :]
    tl.store(partials + slot * (SHAPE.walkers * SHAPE.head_dim) + own, mean, mask=held)
    tl.store(log_sums + slot * SHAPE.walkers + walker, log_sum, mask=walker < SHAPE.walkers)
    # Every thread's part is written before one thread says so, and read only after the last has said so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + token * SHAPE.kv_heads + kv_head, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        tl.debug_barrier()
        first_slot = (item - split).to(tl.int64) * SHAPE.kv_heads + kv_head
        join_items(partials, log_sums, sinks, out_token, first_slot, splits, kv_head, SHAPE)
        tl.store(arrivals + token * SHAPE.kv_heads + kv_head, 0)


@triton.jit
def _query_and_head(walker, SHAPE: tl.constexpr):
    """Of a token's walkers, the number of each one's query, and its head in the group."""
    if SHAPE.queries == 1:
        number, head = walker * 0, walker
    else:
        number, head = walker // SHAPE.group, walker % SHAPE.group
    return number, head


@triton.jit
def _place_in_out(walker, dim, SHAPE: tl.constexpr):
    """Where a walker's result lies behind that of its token's first query."""
    number, head = _query_and_head(walker, SHAPE)
    own = head[:, None] * SHAPE.head_dim + dim[None, :]
    if SHAPE.queries > 1:
        own += number[:, None] * (SHAPE.heads * SHAPE.head_dim)
    return own


@triton.jit
def own_item(item, items, positions, window, QUERIES: tl.constexpr, CONFIG: tl.constexpr):
    """A program's token (-1: nobody's), the item's number among the token's, and their number. A token alone is cut
    into as many items as the grid is high, less one."""
    if items is None:
        first, last = query_span(positions, 0, None, QUERIES)
        _, blocks = key_blocks(first, last, window, CONFIG.block)
        SMALLEST: tl.constexpr = max(32 // CONFIG.block, 1)
        chunk = tl.maximum(tl.cdiv(blocks, tl.num_programs(1) - 1), SMALLEST)
        splits = splits_of(blocks, chunk)
        token = tl.where(item < splits, 0, -1)
        split = item
    else:
        token = tl.load(items + item * 4)
        split = tl.load(items + item * 4 + 1)
        splits = tl.load(items + item * 4 + 2)
    return token, split, splits


@triton.jit
def _ask_ahead(
    k_cache, v_cache, table_row, kv_head, begin, end, oldest, window, SHAPE: tl.constexpr, CONFIG: tl.constexpr
):
    """Keys and values into L2, while the kernel ahead turns and stores the newest: it leaves the memory idle."""
    key = tl.arange(0, CONFIG.block)
    AHEAD: tl.constexpr = CONFIG.ahead
    for ahead in tl.static_range(AHEAD):
        at = tl.minimum(begin + ahead * CONFIG.block + key, end - 1)
        if window is not None:
            at = tl.maximum(at, oldest)
        page = tl.load(table_row + at // SHAPE.page).to(tl.int64)
        offsets = page * SHAPE.page_elements + kv_head * SHAPE.head_elements + at % SHAPE.page * SHAPE.head_dim
        prefetch_to_l2(k_cache + offsets[:, None], SHAPE.head_dim)
        prefetch_to_l2(v_cache + offsets[:, None], SHAPE.head_dim)


@triton.jit
def _attend_keys(
    query, k_cache, v_cache, k_scales, v_scales, table_row, kv_head, begin, end, stands, oldest, factor, cap_factor,
    window, SHAPE: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys `begin..end`: the mean of their values, and the logarithm of the sum of weights.
    `stands` [ROWS]: where each one's query does, if there are several; `oldest`: the first key that any of them
    reads."""
    WIDTH: tl.constexpr = SHAPE.width
    ROWS: tl.constexpr = SHAPE.walker_rows
    dim = tl.arange(0, WIDTH)
    key = tl.arange(0, CONFIG.block)
    k_head = k_cache + kv_head * SHAPE.head_elements + dim[None, :]
    v_head = v_cache + kv_head * SHAPE.head_elements + dim[None, :]
    # One of several queries may have no key among these.
    peak = tl.full([ROWS], float("-inf") if SHAPE.queries == 1 else NO_KEYS, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    value_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(begin, end, CONFIG.block, num_stages=CONFIG.stages):
        at = start + key
        readable = at < end
        # What lies outside the context is another sequence's or nobody's, and may be anything: zero times NaN is NaN.
        # So the context's last key is read again, or its first: that takes fewer instructions than a mask.
        own = tl.minimum(key, end - 1 - start)
        if window is not None:
            readable = readable & (at >= oldest)
            own = tl.maximum(own, oldest - start)
        if SHAPE.page >= CONFIG.block:
            page = tl.load(table_row + start // SHAPE.page).to(tl.int64)
            first = page * SHAPE.page_elements + start % SHAPE.page * SHAPE.head_dim
            offsets = own * SHAPE.head_dim
            slot = start % SHAPE.page + own
        else:
            page = tl.load(table_row + (start + own) // SHAPE.page).to(tl.int64)
            first = 0
            slot = (start + own) % SHAPE.page
            offsets = page * SHAPE.page_elements + slot * SHAPE.head_dim
        keys, values = load_keys_and_values(k_head + first, v_head + first, offsets[:, None], SHAPE)
        scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision=SHAPE.precision)  # [ROWS, block]
        if k_scales is not None:
            scores *= load_scales(k_scales, kv_head, page, slot, SHAPE)[None, :]
        scores = capped(scores, cap_factor)
        if SHAPE.queries == 1:
            scores = tl.where(readable[None, :], scores, float("-inf"))
        else:
            is_own = readable[None, :] & (at[None, :] <= stands[:, None])
            if window is not None:
                is_own = is_own & (at[None, :] > stands[:, None] - window)
            scores = tl.where(is_own, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The factor is multiplied in one instruction with what is subtracted.
        weights = tl.exp2(scores * factor - (new_peak * factor)[:, None])
        decay = tl.exp2((peak - new_peak) * factor)
        total = total * decay + tl.sum(weights, 1)
        value_sum *= decay[:, None]
        if v_scales is not None:
            weights *= load_scales(v_scales, kv_head, page, slot, SHAPE)[None, :]
        value_sum = tl.dot(weights.to(query.dtype), values.to(query.dtype), value_sum, input_precision=SHAPE.precision)
        peak = new_peak
    if SHAPE.queries == 1:
        mean, log_sum = value_sum / total[:, None], peak * factor + tl.log2(total)
    else:
        has_keys = total > 0.0
        mean = value_sum / tl.where(has_keys, total, 1.0)[:, None]
        log_sum = tl.where(has_keys, peak * factor + tl.log2(total), NO_KEYS)
    return mean, log_sum


@triton.jit
def join_items(partials, log_sums, sinks, out_token, first_slot, splits, kv_head, SHAPE: tl.constexpr):
    """Joins the items of one token and KV head. Past the first-level cache, which may hold what was there before."""
    WIDTH: tl.constexpr = SHAPE.width
    WALKERS: tl.constexpr = SHAPE.joined_heads
    walker = tl.arange(0, WALKERS)
    dim = tl.arange(0, WIDTH)
    head_held = (walker < SHAPE.walkers)[:, None] & (dim < SHAPE.head_dim)[None, :]
    own = walker[:, None] * SHAPE.head_dim + dim[None, :]
    peak = tl.full([WALKERS], float("-inf"), tl.float32)
    total = tl.zeros([WALKERS], tl.float32)
    value_sum = tl.zeros([WALKERS, WIDTH], tl.float32)
    for start in tl.range(0, splits, SHAPE.joined_items, num_stages=1):
        index = start + tl.arange(0, SHAPE.joined_items)
        slots = first_slot + index * SHAPE.kv_heads
        held = index < splits
        log_sum = tl.load(
            log_sums + slots[:, None] * SHAPE.walkers + walker[None, :],
            mask=held[:, None] & (walker < SHAPE.walkers)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        # Padded heads have no key at all: a finite peak keeps them from infinity minus infinity.
        log_sum = tl.where((walker < SHAPE.walkers)[None, :], log_sum, 0.0)
        part = tl.load(
            partials + slots[:, None, None] * (SHAPE.walkers * SHAPE.head_dim) + own[None, :, :],
            mask=held[:, None, None] & head_held[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        peak, total, value_sum = join_parts(peak, total, value_sum, log_sum, part)
    _, head = _query_and_head(walker, SHAPE)
    mean = value_sum / total[:, None]
    mean = beside_sinks(mean, peak + tl.log2(total), sinks, kv_head * SHAPE.group + head, walker < SHAPE.walkers)
    tl.store(out_token + _place_in_out(walker, dim, SHAPE), mean.to(out_token.dtype.element_ty), mask=head_held)


def attend_decode(
    queries: torch.Tensor,  # [num_tokens * width, heads, head_dim], any token stride
    kv: PagedKV,
    rows: torch.Tensor,  # int32 [num_tokens * width]
    positions: torch.Tensor,  # int32 [num_tokens * width]
    out: torch.Tensor,  # [num_tokens * width, heads * head_dim], contiguous
    scoring: Scoring,
    scratch: DecodeScratch,
    items: torch.Tensor | None,
    *,
    width: int = 1,
    config: WalkConfig | None = None,
    plan: SplitPlan | None = None,
) -> None:
    """Token t reads the keys at positions `max(0, p - window + 1)..p` of row `rows[t]`, p being `positions[t]`.
    `items`: what `cut_contexts` made of these positions, with the same window, plan and configuration, at least one
    kernel ago: programs read them before they wait. None: of a token alone, which needs none made. `width`: queries of
    a token, side by side, one place further each; one that is not used stands at 0, and its result means nothing."""
    shape = kv.shape_for(queries, width)
    num_tokens = len(queries) // width
    device, window = positions.device, scoring.window
    config = config or decode_config(shape.head_dim, num_tokens, device, window=window)
    plan = plan or split_plan(num_tokens, shape.kv_heads, scratch.num_sms, target_of(device).name, window=window)
    if (
        num_tokens > scratch.max_tokens
        or plan.max_items > scratch.max_items
        or plan.max_items * width > scratch.max_parts
    ):
        raise ValueError(
            f"Decode scratch for {scratch.max_tokens} tokens ({scratch.max_items} items) cannot hold {num_tokens} "
            f"({plan.max_items}, of {width} queries)."
        )
    if shape.group > MAX_GROUP:
        raise ValueError(f"Decode attention takes at most {MAX_GROUP} query heads a KV head, not {shape.group}.")
    if (items is None) != (num_tokens == 1):
        raise ValueError("Decode attention wants the cuts of a batch, and none of a token alone.")
    dependent(_decode_kernel, (shape.kv_heads, plan.max_items), queries.device)(
        queries, kv.keys, kv.values, kv.key_scales, kv.value_scales, kv.table, rows, positions, items, out,
        scratch.partials, scratch.log_sums, scratch.arrivals, scoring.sinks, scoring.factor, scoring.cap_factor,
        scoring.window, queries.stride(0), kv.table.stride(0), FIRST=scoring.first, SHAPE=shape, CONFIG=config,
        num_warps=max(config.warps, min(shape.walker_rows // 16, MAX_WARPS)),
    )  # fmt: skip
