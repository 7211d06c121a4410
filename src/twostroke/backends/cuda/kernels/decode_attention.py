"""Decode attention over the paged cache: one query token a sequence, all query heads of a KV head in one program, a
batch's keys in work items (`decode_cuts.py`). Does not know layers, steps or who wrote the keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from twostroke.backends.cuda.kernels.attention_math import capped, join_parts, load_keys_and_values
from twostroke.backends.cuda.kernels.decode_cuts import (
    ITEM_FIELDS,
    MOST_PROGRAMS_PER_SM,
    SplitPlan,
    decode_config,
    key_blocks,
    most_items,
    split_plan,
    splits_of,
)
from twostroke.backends.cuda.kernels.paged import AttentionShape, PagedKV, Scoring, WalkConfig
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import prefetch_to_l2, wait_and_start_next

ROWS = tl.constexpr(16)
"""Query heads of a program: a group is padded to what a tensor-core product takes at least."""


class DecodeScratch:
    """Where items of one sequence leave their parts for the last of them; made once, shared by all layers in a row."""

    def __init__(self, max_tokens: int, shape: AttentionShape, device: torch.device | str, num_sms: int) -> None:
        self.max_tokens = max_tokens
        self.num_sms = num_sms
        self.max_items = max_tokens + most_items(shape.kv_heads, num_sms, MOST_PROGRAMS_PER_SM)
        # [max_items, kv_heads, group, head_dim] and [max_items, kv_heads, group]
        self.partials = torch.empty(self.max_items * shape.heads * shape.head_dim, dtype=torch.float32, device=device)
        self.log_sums = torch.empty(self.max_items * shape.heads, dtype=torch.float32, device=device)
        # Zero before the first launch; the last item of a sequence sets its own back to zero.
        self.arrivals = torch.zeros(max_tokens * shape.kv_heads, dtype=torch.int32, device=device)

    def new_items(self) -> torch.Tensor:
        """Room for the cuts of one batch  # int32 [max_items, ITEM_FIELDS]"""
        return torch.zeros(self.max_items, ITEM_FIELDS, dtype=torch.int32, device=self.partials.device)


@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode_kernel(
    queries, k_cache, v_cache, table, rows, positions, items, out, partials, log_sums, arrivals, factor, cap_factor,
    window, query_stride, table_stride, SHAPE: tl.constexpr, CONFIG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`items` None: one token, cut here. `window` and `cap_factor` None: there is none."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    # Where the keys lie was known before the kernel ahead began; only its own token's query and key are waited for.
    token, split, splits = _own_item(item, items, positions, window, CONFIG)
    if token < 0:
        if PDL:
            gdc_wait()  # a grid of such programs alone would end, and let the next begin, before what it stands behind
        return
    position = tl.load(positions + token)
    first_block, blocks = key_blocks(position, window, CONFIG.block)
    begin = (first_block + blocks * split // splits) * CONFIG.block
    end = tl.minimum((first_block + blocks * (split + 1) // splits) * CONFIG.block, position + 1)
    oldest = 0
    if window is not None:
        oldest = tl.maximum(position - window + 1, 0)
    table_row = table + tl.load(rows + token).to(tl.int64) * table_stride
    if PDL:
        _ask_ahead(k_cache, v_cache, table_row, kv_head, begin, end, oldest, window, SHAPE, CONFIG)
    wait_and_start_next(PDL)

    head = tl.arange(0, ROWS)
    dim = tl.arange(0, SHAPE.width)
    held = (head < SHAPE.group)[:, None] & (dim < SHAPE.head_dim)[None, :]
    own = head[:, None] * SHAPE.head_dim + dim[None, :]
    first_query = token.to(tl.int64) * query_stride + kv_head * SHAPE.elements
    query = tl.load(queries + first_query + own, mask=held, other=0.0)
    mean, log_sum = _attend_keys(
        query, k_cache, v_cache, table_row, kv_head, begin, end, oldest, factor, cap_factor, window, SHAPE, CONFIG
    )
    out_token = out + (token.to(tl.int64) * SHAPE.kv_heads + kv_head) * SHAPE.elements
    if splits == 1:
        tl.store(out_token + own, mean.to(out.dtype.element_ty), mask=held)
        return

    slot = item.to(tl.int64) * SHAPE.kv_heads + kv_head
    tl.store(partials + slot * SHAPE.elements + own, mean, mask=held)
    tl.store(log_sums + slot * SHAPE.group + head, log_sum, mask=head < SHAPE.group)
    # Every thread's part is written before one thread says so, and read only after the last has said so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + token * SHAPE.kv_heads + kv_head, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        tl.debug_barrier()
        first_slot = (item - split).to(tl.int64) * SHAPE.kv_heads + kv_head
        _join(partials, log_sums, out_token, first_slot, splits, SHAPE)
        tl.store(arrivals + token * SHAPE.kv_heads + kv_head, 0)


@triton.jit
def _own_item(item, items, positions, window, CONFIG: tl.constexpr):
    """A program's token (-1: nobody's), the item's number among the token's, and their number. A token alone is cut
    into as many items as the grid is high, less one."""
    if items is None:
        _, blocks = key_blocks(tl.load(positions), window, CONFIG.block)
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
        offsets = page * SHAPE.page_elements + (kv_head * SHAPE.page + at % SHAPE.page) * SHAPE.head_dim
        prefetch_to_l2(k_cache + offsets[:, None], SHAPE.head_dim)
        prefetch_to_l2(v_cache + offsets[:, None], SHAPE.head_dim)


@triton.jit
def _attend_keys(
    query, k_cache, v_cache, table_row, kv_head, begin, end, oldest, factor, cap_factor, window,
    SHAPE: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys `begin..end`: the mean of their values, and the logarithm of the sum of weights."""
    WIDTH: tl.constexpr = SHAPE.width
    dim = tl.arange(0, WIDTH)
    key = tl.arange(0, CONFIG.block)
    k_head = k_cache + kv_head * SHAPE.page * SHAPE.head_dim + dim[None, :]
    v_head = v_cache + kv_head * SHAPE.page * SHAPE.head_dim + dim[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
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
        else:
            page = tl.load(table_row + (start + own) // SHAPE.page).to(tl.int64)
            first = 0
            offsets = page * SHAPE.page_elements + (start + own) % SHAPE.page * SHAPE.head_dim
        keys, values = load_keys_and_values(k_head + first, v_head + first, offsets[:, None], SHAPE)
        scores = capped(tl.dot(query, tl.trans(keys), input_precision=SHAPE.precision), cap_factor)  # [ROWS, block]
        scores = tl.where(readable[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # The factor is multiplied in one instruction with what is subtracted.
        weights = tl.exp2(scores * factor - (new_peak * factor)[:, None])
        decay = tl.exp2((peak - new_peak) * factor)
        total = total * decay + tl.sum(weights, 1)
        value_sum *= decay[:, None]
        value_sum = tl.dot(weights.to(values.dtype), values, value_sum, input_precision=SHAPE.precision)
        peak = new_peak
    return value_sum / total[:, None], peak * factor + tl.log2(total)


@triton.jit
def _join(partials, log_sums, out_token, first_slot, splits, SHAPE: tl.constexpr):
    """Joins the items of one token and KV head. Past the first-level cache, which may hold what was there before."""
    WIDTH: tl.constexpr = SHAPE.width
    GROUP: tl.constexpr = SHAPE.joined_heads
    head = tl.arange(0, GROUP)
    dim = tl.arange(0, WIDTH)
    head_held = (head < SHAPE.group)[:, None] & (dim < SHAPE.head_dim)[None, :]
    own = head[:, None] * SHAPE.head_dim + dim[None, :]
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    value_sum = tl.zeros([GROUP, WIDTH], tl.float32)
    for start in tl.range(0, splits, SHAPE.joined_items, num_stages=1):
        index = start + tl.arange(0, SHAPE.joined_items)
        slots = first_slot + index * SHAPE.kv_heads
        held = index < splits
        log_sum = tl.load(
            log_sums + slots[:, None] * SHAPE.group + head[None, :],
            mask=held[:, None] & (head < SHAPE.group)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        # Padded heads have no key at all: a finite peak keeps them from infinity minus infinity.
        log_sum = tl.where((head < SHAPE.group)[None, :], log_sum, 0.0)
        part = tl.load(
            partials + slots[:, None, None] * SHAPE.elements + own[None, :, :],
            mask=held[:, None, None] & head_held[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        peak, total, value_sum = join_parts(peak, total, value_sum, log_sum, part)
    tl.store(out_token + own, (value_sum / total[:, None]).to(out_token.dtype.element_ty), mask=head_held)


def attend_decode(
    queries: torch.Tensor,  # [num_tokens, heads, head_dim], any token stride
    kv: PagedKV,
    rows: torch.Tensor,  # int32 [num_tokens]
    positions: torch.Tensor,  # int32 [num_tokens]
    out: torch.Tensor,  # [num_tokens, heads * head_dim], contiguous
    scoring: Scoring,
    scratch: DecodeScratch,
    items: torch.Tensor | None,
    *,
    config: WalkConfig | None = None,
    plan: SplitPlan | None = None,
) -> None:
    """Token t reads the keys at positions `max(0, p - window + 1)..p` of row `rows[t]`, p being `positions[t]`.
    `items`: what `cut_contexts` made of these positions, with the same window, plan and configuration, at least one
    kernel ago: programs read them before they wait. None: of a token alone, which needs none made."""
    shape = kv.shape_for(queries)
    num_tokens = len(queries)
    config = config or decode_config(shape.head_dim, num_tokens, positions.device)
    plan = plan or split_plan(num_tokens, shape.kv_heads, scratch.num_sms)
    if num_tokens > scratch.max_tokens or plan.max_items > scratch.max_items:
        raise ValueError(
            f"Decode scratch for {scratch.max_tokens} tokens ({scratch.max_items} items) cannot hold {num_tokens} "
            f"({plan.max_items})."
        )
    if shape.group > ROWS.value:
        raise ValueError(f"Decode attention takes at most {ROWS.value} query heads a KV head, not {shape.group}.")
    if (items is None) != (num_tokens == 1):
        raise ValueError("Decode attention wants the cuts of a batch, and none of a token alone.")
    dependent(_decode_kernel, (shape.kv_heads, plan.max_items), queries.device)(
        queries, kv.keys, kv.values, kv.table, rows, positions, items, out, scratch.partials, scratch.log_sums,
        scratch.arrivals, scoring.factor, scoring.cap_factor, scoring.window, queries.stride(0), kv.table.stride(0),
        SHAPE=shape, CONFIG=config, num_warps=config.warps,
    )  # fmt: skip
