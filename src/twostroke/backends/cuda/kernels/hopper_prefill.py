"""Prefill attention for Hopper in Gluon: asynchronous tensor-core products, so that one block's softmax runs beside the
next block's scores, and keys come by TMA from whole pages. Causal only, head sizes 64 and 128, pages of a multiple of
64; the tiles are those of the plain kernel, which takes everything else."""

# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.gluon_layouts import shared_layout
from twostroke.backends.cuda.kernels.prefill_attention import check_shapes, combine_parts
from twostroke.backends.cuda.kernels.prefill_tiles import ITEM_FIELDS, PrefillScratch, PrefillWork
from twostroke.backends.cuda.kernels.scores import LOG2_E

BLOCK = 64
"""Keys a round: what two programs an SM leave room for, twice each for K and V."""
WARPS = 4
FIELDS = gl.constexpr(ITEM_FIELDS)
LOWEST = gl.constexpr(-1.0e30)
"""The peak of a query that has seen no key yet: finite, so that a wholly masked block weighs nothing and is no NaN."""


def masked_rounds(tokens: int) -> int:
    """Blocks of keys that the diagonal of a tile can touch, wherever it begins."""
    return (tokens + BLOCK - 3) // BLOCK + 1


@gluon.jit
def _page_row(table_row, block, kv_head, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr):
    """Where a block of keys begins among the rows of the cache, seen as [pages * kv_heads * page size, head_dim]."""
    start = block * BLOCK
    return (gl.load(table_row + start // PAGE) * KV_HEADS + kv_head) * PAGE + start % PAGE


@gluon.jit
def _fetch(rows, row, ready, buffer, wanted):
    """Starts the copy of one block; `ready` flips when it has arrived."""
    mbarrier.expect(ready, rows.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(rows, [row, 0], ready, buffer, pred=wanted)


@gluon.jit
def _clear_values_behind(values, filled, HEAD_DIM: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Sets the values behind the context to zero: they are nobody's, and zero weight times NaN would be NaN."""
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HEAD_DIM // 8), HEAD_DIM // 8], [WARPS, 1], [1, 0])
    key = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, copy))
    held = values.load(copy)
    values.store(gl.where(gl.expand_dims(key, 1) < filled, held, gl.zeros_like(held)))
    fence_async_shared()


@gluon.jit
def _pin(totals):
    """Keeps what these sums are made of in front of the next wait. The assembler sees that the softmax does not need
    the product it should run beside, and moves it behind the wait for it; a store that depends on the softmax cannot
    be moved. It is never done: a sum of powers is not negative."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000; "
        "@p st.volatile.shared.b32 [a], $1; mov.b32 $0, $1; }",
        "=r,r",
        [totals],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _round(
    j, rounds, peak, total, value_sum, weights, row, position, key, query, no_scores,
    k_rows, v_rows, keys, values, k_ready, v_ready, table_row, top, kv_head, scale_log2,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr, MASKED: gl.constexpr,
    PINNED: gl.constexpr, OUT: gl.constexpr, WEIGHTS: gl.constexpr,
):  # fmt: skip
    """Round j: its scores and the values of round j - 1 are multiplied at once; block `top - j`, buffer j % 2.

    A buffer is filled again only after the product that read it is done: K of j - 1 at the end of the round before,
    V of j - 1 after the second wait of this one. Buffer j % 2 is filled for the (j // 2)-th time, hence the phases."""
    own = j % 2
    other = 1 - own
    more = j + 1 < rounds
    _fetch(k_rows, row, k_ready.index(other), keys.index(other), more)
    mbarrier.wait(k_ready.index(own), (j // 2) & 1)
    score_token = warpgroup_mma(query, keys.index(own).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(other), ((j - 1) // 2) & 1)
    value_token = warpgroup_mma(weights, values.index(other), value_sum, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[score_token])
    if MASKED:
        scores = gl.where(gl.expand_dims(key - j * BLOCK, 0) <= gl.expand_dims(position, 1), scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    new_weights = gl.exp2(scores * scale_log2 - gl.expand_dims(new_peak, 1))
    decay = gl.exp2(peak - new_peak)
    total = total * decay + gl.sum(new_weights, 1)
    if PINNED:
        total = _pin(total)
    value_sum = warpgroup_mma_wait(0, deps=[value_token])
    _fetch(v_rows, row, v_ready.index(other), values.index(other), more)
    row = _page_row(table_row, gl.maximum(top - j - 2, 0), kv_head, KV_HEADS, PAGE, BLOCK)
    value_sum = value_sum * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT)), 1)
    weights = gl.convert_layout(new_weights.to(k_rows.dtype), WEIGHTS)
    return new_peak, total, value_sum, weights, row


@gluon.jit(do_not_specialize=["table_stride"])
def _hopper_prefill_kernel(
    queries, k_rows, v_rows, table, items, out, partials, log_sums,
    scale_log2, query_stride, table_stride,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE: gl.constexpr,
    TILE: gl.constexpr, BLOCK: gl.constexpr, MASKED: gl.constexpr, WARPS: gl.constexpr, PINNED: gl.constexpr,
):  # fmt: skip
    kv_head = gl.program_id(0)
    item = gl.program_id(1)
    own = items + item * FIELDS
    tokens = gl.load(own + 2)
    if tokens > 0:
        table_row = table + gl.load(own).to(gl.int64) * table_stride
        first_token, base, context = gl.load(own + 1), gl.load(own + 3), gl.load(own + 4)
        part, parts = gl.load(own + 5), gl.load(own + 6)
        SCORES: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK, 16]
        )
        OUT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, HEAD_DIM, 16]
        )
        WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)

        # The tile's queries stand at positions base..base + tokens - 1. Its blocks of keys are walked from the last
        # one down: the diagonal comes first, and after MASKED rounds every key is one that all queries read.
        blocks = (base + tokens - 1) // BLOCK + 1
        begin = blocks * part // parts
        end = blocks * (part + 1) // parts
        rounds = end - begin  # at least 1: a tile is never cut into more parts than it has blocks
        top = end - 1

        keys = gl.allocate_shared_memory(k_rows.dtype, [2, BLOCK, HEAD_DIM], k_rows.layout)
        values = gl.allocate_shared_memory(k_rows.dtype, [2, BLOCK, HEAD_DIM], v_rows.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(2):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(v_ready.index(i), count=1)
        fence_async_shared()
        row = _page_row(table_row, top, kv_head, KV_HEADS, PAGE, BLOCK)
        _fetch(k_rows, row, k_ready.index(0), keys.index(0), True)
        _fetch(v_rows, row, v_ready.index(0), values.index(0), True)
        row = _page_row(table_row, gl.maximum(top - 1, 0), kv_head, KV_HEADS, PAGE, BLOCK)
        _fetch(k_rows, row, k_ready.index(1), keys.index(1), rounds > 1)
        _fetch(v_rows, row, v_ready.index(1), values.index(1), rounds > 1)
        row = _page_row(table_row, gl.maximum(top - 2, 0), kv_head, KV_HEADS, PAGE, BLOCK)

        # Queries: all heads of the group for each token; rows that no token fills are zero and never stored.
        COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (HEAD_DIM // 8), HEAD_DIM // 8], [WARPS, 1], [1, 0])
        copy_row = gl.arange(0, TILE, layout=gl.SliceLayout(1, COPY))
        copy_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
        copy_at = (first_token + copy_row // GROUP).to(gl.int64) * query_stride
        copy_at += (kv_head * GROUP + copy_row % GROUP) * HEAD_DIM
        query_values = gl.load(
            queries + gl.expand_dims(copy_at, 1) + gl.expand_dims(copy_dim, 0),
            mask=gl.expand_dims(copy_row < tokens * GROUP, 1),
            other=0.0,
        )
        query = gl.allocate_shared_memory(k_rows.dtype, [TILE, HEAD_DIM], k_rows.layout)
        query.store(query_values)
        fence_async_shared()

        # Round 0, whose scores have nothing to run beside.
        position = base + gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES)) // GROUP
        key = top * BLOCK + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, SCORES))
        no_scores = gl.zeros([TILE, BLOCK], gl.float32, SCORES)
        value_sum = gl.zeros([TILE, HEAD_DIM], gl.float32, OUT)
        if end * BLOCK > context:
            mbarrier.wait(v_ready.index(0), 0)
            _clear_values_behind(values.index(0), context - top * BLOCK, HEAD_DIM, BLOCK, WARPS)
        mbarrier.wait(k_ready.index(0), 0)
        scores = warpgroup_mma(query, keys.index(0).permute((1, 0)), no_scores, use_acc=False)
        scores = gl.where(gl.expand_dims(key, 0) <= gl.expand_dims(position, 1), scores, float("-inf"))
        peak = gl.maximum(gl.max(scores, 1) * scale_log2, LOWEST)
        first_weights = gl.exp2(scores * scale_log2 - gl.expand_dims(peak, 1))
        total = gl.sum(first_weights, 1)
        weights = gl.convert_layout(first_weights.to(k_rows.dtype), WEIGHTS)
        for j in gl.static_range(1, MASKED):
            if j < rounds:
                peak, total, value_sum, weights, row = _round(
                    j, rounds, peak, total, value_sum, weights, row, position, key, query, no_scores,
                    k_rows, v_rows, keys, values, k_ready, v_ready, table_row, top, kv_head, scale_log2,
                    KV_HEADS, PAGE, BLOCK, True, False, OUT, WEIGHTS,
                )  # fmt: skip
        for j in range(MASKED, rounds):
            peak, total, value_sum, weights, row = _round(
                j, rounds, peak, total, value_sum, weights, row, position, key, query, no_scores,
                k_rows, v_rows, keys, values, k_ready, v_ready, table_row, top, kv_head, scale_log2,
                KV_HEADS, PAGE, BLOCK, False, PINNED, OUT, WEIGHTS,
            )  # fmt: skip
        mbarrier.wait(v_ready.index((rounds - 1) % 2), ((rounds - 1) // 2) & 1)
        value_sum = warpgroup_mma(weights, values.index((rounds - 1) % 2), value_sum)

        out_row = gl.arange(0, TILE, layout=gl.SliceLayout(1, OUT))
        out_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT))
        held = out_row < tokens * GROUP
        safe_total = gl.where(total == 0.0, 1.0, total)
        mean = value_sum / gl.expand_dims(gl.convert_layout(safe_total, gl.SliceLayout(1, OUT)), 1)
        if parts == 1:
            at = (first_token + out_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP * HEAD_DIM)
            at += (kv_head * GROUP + out_row % GROUP) * HEAD_DIM
            gl.store(
                out + gl.expand_dims(at, 1) + gl.expand_dims(out_dim, 0),
                mean.to(out.dtype.element_ty),
                mask=gl.expand_dims(held, 1),
            )
        else:
            slot = (item * KV_HEADS + kv_head).to(gl.int64) * TILE
            at = (slot + out_row) * HEAD_DIM
            gl.store(partials + gl.expand_dims(at, 1) + gl.expand_dims(out_dim, 0), mean, mask=gl.expand_dims(held, 1))
            sum_row = gl.arange(0, TILE, layout=gl.SliceLayout(1, SCORES))
            gl.store(log_sums + slot + sum_row, peak + gl.log2(total))


def attend_prefill_hopper(
    queries: torch.Tensor,  # [num_tokens, heads, head_dim], any token stride
    k_cache: torch.Tensor,  # [num_blocks + 1, kv_heads, block_size, head_dim], contiguous
    v_cache: torch.Tensor,
    table: torch.Tensor,  # int32 [num_rows, table_len]
    work: PrefillWork,
    out: torch.Tensor,  # [num_tokens, heads * head_dim], contiguous
    *,
    scale: float,
    scratch: PrefillScratch,
    pinned: bool = False,
) -> None:
    """As `attend_prefill`, without window and soft cap; tiles of 64 or 128 rows. `pinned` is for measuring: whether the
    softmax is kept beside the product before it."""
    kv_heads, group, head_dim, page = check_shapes(queries, k_cache, v_cache, work, scratch)
    if work.tile_rows not in (64, 128):
        raise ValueError(f"The Hopper kernel takes tiles of 64 or 128 rows, not {work.tile_rows}.")
    layout = shared_layout(BLOCK, head_dim, k_cache.dtype)
    k_rows, v_rows = (
        TensorDescriptor(cache, [cache.numel() // head_dim, head_dim], [head_dim, 1], [BLOCK, head_dim], layout)
        for cache in (k_cache, v_cache)
    )
    launcher(_hopper_prefill_kernel, (kv_heads, len(work.items)))(
        queries,
        k_rows,
        v_rows,
        table,
        work.items,
        out,
        scratch.partials,
        scratch.log_sums,
        scale * LOG2_E,
        queries.stride(0),
        table.stride(0),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page,
        TILE=work.tile_rows,
        BLOCK=BLOCK,
        MASKED=masked_rounds(work.tile_rows // group),
        WARPS=WARPS,
        PINNED=pinned,
        num_warps=WARPS,
    )
    if work.part_items:
        combine_parts(work, scratch, out, kv_heads, group, head_dim)
