"""Decode attention over latents: a program takes many heads of one token against tiles of latents, which are keys and,
but for their rotated numbers, values of all heads at once. A batch's latents are cut into work items as keys are
(`decode_cuts.py`), and their parts joined as those of other decodes are. Queries were brought into the latents' space
before; what comes out is in it, too."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, join_items, own_item
from twostroke.backends.cuda.kernels.decode_cuts import SplitPlan, key_blocks, split_plan
from twostroke.backends.cuda.kernels.latent_store import LatentKV
from twostroke.backends.cuda.kernels.paged import LOG2_E, AttentionShape, WalkConfig
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import wait_and_start_next


def latent_shape(
    heads: int, rank: int, page: int, dtype: torch.dtype, shared_bytes: int | None = None
) -> AttentionShape:
    """As kernels take it: one latent for all heads, which are taken in as many blocks as `kv_heads` says. A block has
    no more heads than a program's registers have sums for, and its shared memory queries."""
    room = {} if shared_bytes is None else {"shared_bytes": shared_bytes}
    most = settings_for("latent heads", "", **room)["most"]
    blocks = next(count for count in range(1, heads + 1) if heads % count == 0 and heads // count <= most)
    return AttentionShape(heads, blocks, rank, page, dtype)


@cache
def latent_config(shape: AttentionShape, num_tokens: int, device: torch.device) -> WalkConfig:
    target, facts = target_of(device), {"rows": shape.walker_rows, "tokens": num_tokens}
    return WalkConfig(**settings_for("latent decode", target.name, **facts, **target.room))


@triton.jit
def walk_latents(
    query, rotated_query, cache, table_row, begin, end, factor, SHAPE: tl.constexpr, ROTATED: tl.constexpr,
    ROWS: tl.constexpr, CONFIG: tl.constexpr,
):  # fmt: skip
    """Online softmax over the latents `begin..end`, of which there is one at least: their mean, and the logarithm of
    the sum of weights."""
    RANK: tl.constexpr = SHAPE.head_dim
    WIDTH: tl.constexpr = SHAPE.width
    ROTATED_WIDTH: tl.constexpr = max(16, triton.next_power_of_2(ROTATED))
    column = tl.arange(0, WIDTH)
    rotated_column = tl.arange(0, ROTATED_WIDTH)
    key = tl.arange(0, CONFIG.block)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in tl.range(begin, end, CONFIG.block, num_stages=CONFIG.stages):
        # What lies behind the context is another sequence's or nobody's: the last latent is read again.
        own = start + tl.minimum(key, end - 1 - start)
        page = tl.load(table_row + own // SHAPE.page).to(tl.int64)
        places = cache + ((page * SHAPE.page + own % SHAPE.page) * (RANK + ROTATED))[:, None]
        if RANK == WIDTH:
            latents = tl.load(places + column[None, :])
        else:
            latents = tl.load(places + column[None, :], mask=(column < RANK)[None, :], other=0.0)
        is_rotated = (rotated_column < ROTATED)[None, :]
        turned = tl.load(places + RANK + rotated_column[None, :], mask=is_rotated, other=0.0)
        scores = tl.dot(query, tl.trans(latents), input_precision=SHAPE.precision)
        scores = tl.dot(rotated_query, tl.trans(turned), scores, input_precision=SHAPE.precision)
        scores = tl.where((start + key < end)[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores * factor - (new_peak * factor)[:, None])
        decay = tl.exp2((peak - new_peak) * factor)
        total = total * decay + tl.sum(weights, 1)
        sums *= decay[:, None]
        sums = tl.dot(weights.to(latents.dtype), latents, sums, input_precision=SHAPE.precision)
        peak = new_peak
    return sums / total[:, None], peak * factor + tl.log2(total)


@triton.jit
def load_queries(rows, held, SHAPE: tl.constexpr, ROTATED: tl.constexpr):
    """rows: pointers to queries in the latents' space; of each its plain and its rotated part."""
    RANK: tl.constexpr = SHAPE.head_dim
    WIDTH: tl.constexpr = SHAPE.width
    ROTATED_WIDTH: tl.constexpr = max(16, triton.next_power_of_2(ROTATED))
    column = tl.arange(0, WIDTH)[None, :]
    rotated_column = tl.arange(0, ROTATED_WIDTH)[None, :]
    query = tl.load(rows[:, None] + column, mask=held[:, None] & (column < RANK), other=0.0)
    turned = tl.load(rows[:, None] + RANK + rotated_column, mask=held[:, None] & (rotated_column < ROTATED), other=0.0)
    return query, turned


@triton.jit(do_not_specialize=["table_stride"])
def _latent_decode_kernel(
    queries, cache, table, rows, positions, items, out, partials, log_sums, arrivals, factor, table_stride,
    FIRST: tl.constexpr, SHAPE: tl.constexpr, ROTATED: tl.constexpr, CONFIG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`items` None: one token, cut here."""
    head_block = tl.program_id(0)
    item = tl.program_id(1)
    token, split, splits = own_item(item, items, positions, None, 1, CONFIG)
    if token < 0:
        if PDL:
            gdc_wait()  # a grid of such programs alone would end, and let the next begin, before what it stands behind
        return
    position = tl.load(positions + token)
    _, blocks = key_blocks(position, position, None, CONFIG.block)
    begin = tl.maximum(blocks * split // splits * CONFIG.block, tl.minimum(position, FIRST))
    end = tl.minimum(blocks * (split + 1) // splits * CONFIG.block, position + 1)
    table_row = table + tl.load(rows + token).to(tl.int64) * table_stride
    wait_and_start_next(PDL)

    ROWS: tl.constexpr = SHAPE.walker_rows
    RANK: tl.constexpr = SHAPE.head_dim
    WIDTH: tl.constexpr = SHAPE.width
    head = tl.arange(0, ROWS)
    held = head < SHAPE.group
    own_heads = queries + (token.to(tl.int64) * SHAPE.heads + head_block * SHAPE.group + head) * (RANK + ROTATED)
    query, turned = load_queries(own_heads, held, SHAPE, ROTATED)
    mean, log_sum = walk_latents(query, turned, cache, table_row, begin, end, factor, SHAPE, ROTATED, ROWS, CONFIG)
    column = tl.arange(0, WIDTH)
    own = head[:, None] * RANK + column[None, :]
    mask = held[:, None] & (column < RANK)[None, :]
    out_token = out + (token.to(tl.int64) * SHAPE.kv_heads + head_block) * SHAPE.elements
    if splits == 1:
        tl.store(out_token + own, mean.to(out.dtype.element_ty), mask=mask)
        return
    slot = item.to(tl.int64) * SHAPE.kv_heads + head_block
    tl.store(partials + slot * SHAPE.elements + own, mean, mask=mask)
    tl.store(log_sums + slot * SHAPE.group + head, log_sum, mask=held)
    # Every thread's part is written before one thread says so, and read only after the last has said so.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals + token * SHAPE.kv_heads + head_block, 1, sem="acq_rel", scope="gpu")
    if arrived == splits - 1:
        tl.debug_barrier()
        first_slot = (item - split).to(tl.int64) * SHAPE.kv_heads + head_block
        join_items(partials, log_sums, None, out_token, first_slot, splits, head_block, SHAPE)
        tl.store(arrivals + token * SHAPE.kv_heads + head_block, 0)


def attend_latent_decode(
    queries: torch.Tensor,  # [num_tokens, heads, rank + rotated], contiguous
    kv: LatentKV,
    rows: torch.Tensor,  # int32 [num_tokens]
    positions: torch.Tensor,  # int32 [num_tokens]
    out: torch.Tensor,  # [num_tokens, heads, rank], contiguous
    scale: float,
    scratch: DecodeScratch,
    items: torch.Tensor | None,
    *,
    shape: AttentionShape,
    first: int = 0,
    config: WalkConfig | None = None,
    plan: SplitPlan | None = None,
) -> None:
    """Token t reads the latents at positions `first` to `positions[t]` of row `rows[t]`, its own always. `items`: as
    `attend_decode` has it, of this plan and configuration."""
    num_tokens = len(queries)
    config = config or latent_config(shape, num_tokens, positions.device)
    plan = plan or split_plan(
        num_tokens, shape.kv_heads, scratch.num_sms, target_of(positions.device).name, window=None
    )
    if num_tokens > scratch.max_tokens or plan.max_items > scratch.max_items:
        raise ValueError(f"Decode scratch for {scratch.max_tokens} tokens cannot hold {num_tokens}.")
    if (items is None) != (num_tokens == 1):
        raise ValueError("Decode attention wants the cuts of a batch, and none of a token alone.")
    assert queries.is_contiguous() and out.is_contiguous() and kv.cache.is_contiguous()
    dependent(_latent_decode_kernel, (shape.kv_heads, plan.max_items), queries.device)(
        queries, kv.cache, kv.table, rows, positions, items, out, scratch.partials, scratch.log_sums, scratch.arrivals,
        scale * LOG2_E, kv.table.stride(0), FIRST=first, SHAPE=shape, ROTATED=queries.shape[2] - shape.head_dim,
        CONFIG=config, num_warps=config.warps,
    )  # fmt: skip
