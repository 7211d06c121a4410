"""The experts' matrix products for Hopper in Gluon: a program an SM walks over tiles of (expert, rows, outputs).
Weights come by TMA into a ring of buffers that runs on from tile to tile: one tile's results are stored while the next
one's weights arrive. Rows are as `moe_routing.py` sorts them; `moe_grouped.py` takes every other device and shape."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from twostroke.backends.cuda.kernels.activation import Activation, activate
from twostroke.backends.cuda.kernels.expert_tiles import HopperTile
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.product import DEPTH
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import wait_and_start_next

ELEMENT_TYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Every warp of a program waits for the others: `thread_barrier` in Triton 3.6, `barrier` since."""


@cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a block that a bulk copy brings. Kept: Gluon takes longer to think of it than a kernel to be launched."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENT_TYPES[dtype])


@gluon.jit
def _tiles_of(begin, end, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    return (end - begin + ROWS - 1) // ROWS * BLOCKS


@gluon.jit
def _walk(starts, expert, begin, end, own, EXPERTS: gl.constexpr, ROWS: gl.constexpr, BLOCKS: gl.constexpr):
    """From tile `own` of an expert, perhaps beyond its last, to the expert whose it is; behind the last: EXPERTS."""
    tiles = _tiles_of(begin, end, ROWS, BLOCKS)
    while (own >= tiles) & (expert < EXPERTS):
        own -= tiles
        expert += 1
        begin = end
        end = gl.load(starts + gl.minimum(expert + 1, EXPERTS))
        tiles = _tiles_of(begin, end, ROWS, BLOCKS)
    return expert, begin, end, own


@gluon.jit
def _cut(begin, end, own, ROWS: gl.constexpr):
    """A tile's first row and its block of outputs. Tiles that read the same weights are neighbours, so that L2 serves
    all but the first."""
    row_tiles = gl.maximum((end - begin + ROWS - 1) // ROWS, 1)
    return begin + own % row_tiles * ROWS, own // row_tiles


@gluon.jit
def _sources(sorted_pairs, first, end, row, num_inputs: gl.constexpr, top_k: gl.constexpr, GATHERED: gl.constexpr):
    """Where a tile's rows begin in the inputs; those beyond the end are never read."""
    source = first + row
    if GATHERED:
        source = gl.load(sorted_pairs + source, mask=source < end, other=0) // top_k
    return source.to(gl.int64) * num_inputs


@gluon.jit
def _settle(
    starts, sorted_pairs, expert, begin, end, own, copy_row,
    num_outputs: gl.constexpr, num_inputs: gl.constexpr, EXPERTS: gl.constexpr, top_k: gl.constexpr,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """`_walk`, and of the tile: its first row, its block of outputs, its weights' first row, where its rows begin."""
    expert, begin, end, own = _walk(starts, expert, begin, end, own, EXPERTS, ROWS, num_outputs // OUTPUTS)
    first, block = _cut(begin, end, own, ROWS)
    first_weight = expert * (num_outputs * HALVES) + block * OUTPUTS
    sources = _sources(sorted_pairs, first, end, copy_row, num_inputs, top_k, HALVES == 2)
    return expert, begin, end, own, first, block, first_weight, sources


@gluon.jit
def _fetch(
    stage, column, first, first_weight, end, sources, copy_row, depth, inputs, x_rows, w_rows, ready, rows, copied,
    num_outputs: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """A round's weights, by TMA, and its rows, by TMA, too, or row by row: then every thread arrives at the round's
    barrier when what it copied is there."""
    HALVES: gl.constexpr = 1 if GATED is None else 2
    arrived = ready.index(stage)
    mbarrier.expect(arrived, w_rows.block_type.nbytes * HALVES)
    tma.async_copy_global_to_shared(w_rows, [first_weight, column], arrived, copied.index(stage * HALVES))
    if GATED is not None:
        ups = copied.index(stage * HALVES + 1)
        tma.async_copy_global_to_shared(w_rows, [first_weight + num_outputs, column], arrived, ups)
    if x_rows is not None:
        mbarrier.expect(arrived, x_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(x_rows, [first, column], arrived, rows.index(stage))
    else:
        pointers = inputs + (gl.expand_dims(sources, 1) + gl.expand_dims(column + depth, 0))
        is_row = gl.expand_dims(first + copy_row < end, 1)
        async_copy.async_copy_global_to_shared(rows.index(stage), pointers, mask=is_row)
        async_copy.mbarrier_arrive(arrived, increment_count=False)


@gluon.jit
def _halves(sums):
    """The first and the second half of the outputs, which lie in the same threads."""
    return gl.split(sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def _store(found, results, first, end, first_output, num_outputs: gl.constexpr, WARPS: gl.constexpr):
    """Eight outputs of a row at a time, of the rows there are."""
    OUTPUTS: gl.constexpr = found.shape[1]
    ACROSS: gl.constexpr = min(32, OUTPUTS // 8)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    found = gl.convert_layout(found.to(results.dtype.element_ty), STORE)
    row = first + gl.arange(0, found.shape[0], layout=gl.SliceLayout(1, STORE))
    output = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, STORE))
    at = gl.expand_dims(row.to(gl.int64) * num_outputs, 1) + gl.expand_dims(output, 0)
    gl.store(results + at, found, mask=gl.expand_dims(row < end, 1))


@gluon.jit
def _finish(
    sums, results, first, end, first_output, num_outputs: gl.constexpr, GATED: gl.constexpr, PIECES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    if GATED is not None:
        gates, ups = _halves(sums)
        found = activate(gates, ups, GATED)
    else:
        found = sums
    gl.static_assert(PIECES <= 2)
    if PIECES == 2:
        lower, upper = _halves(found)
        _store(lower, results, first, end, first_output, num_outputs, WARPS)
        _store(upper, results, first, end, first_output + found.shape[1] // 2, num_outputs, WARPS)
    else:
        _store(found, results, first, end, first_output, num_outputs, WARPS)


@gluon.jit
def _hopper_grouped_kernel(
    inputs, x_rows, w_rows, results, sorted_pairs, starts,
    num_outputs: gl.constexpr, num_inputs: gl.constexpr, EXPERTS: gl.constexpr, top_k: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    PIECES: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """GATED: inputs are the tokens' own, gate and up become one result. Else inputs are rows in order."""
    ROUNDS: gl.constexpr = num_inputs // DEPTH
    HALVES: gl.constexpr = 1 if GATED is None else 2
    WIDTH: gl.constexpr = OUTPUTS * HALVES
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    rows = gl.allocate_shared_memory(w_rows.dtype, [STAGES, ROWS, DEPTH], w_rows.layout)
    # A round's gate and up lie behind each other: two copies, one matrix.
    copied = gl.allocate_shared_memory(w_rows.dtype, [STAGES * HALVES, OUTPUTS, DEPTH], w_rows.layout)
    weights = copied._reinterpret(w_rows.dtype, [STAGES, WIDTH, DEPTH], w_rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Who arrives at a round's barrier: the thread that expects weights, and those that expect or copy rows.
    ARRIVALS: gl.constexpr = 1 if x_rows is not None else 32 * WARPS
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1 + ARRIVALS)
    fence_async_shared()

    # The trigger comes after the wait: the plain kernel, which may follow, reads `starts` before its own.
    wait_and_start_next(PDL)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DEPTH // 8), DEPTH // 8], [WARPS, 1], [1, 0])
    copy_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
    expert, begin, end, own, first, block, first_weight, sources = _settle(
        starts, sorted_pairs, gl.to_tensor(0), gl.load(starts), gl.load(starts + 1), program, copy_row, num_outputs,
        num_inputs, EXPERTS, top_k, ROWS, OUTPUTS, HALVES,
    )  # fmt: skip

    if expert < EXPERTS:
        for stage in gl.static_range(STAGES - 1):
            _fetch(
                stage, stage * DEPTH, first, first_weight, end, sources, copy_row, depth, inputs, x_rows, w_rows,
                ready, rows, copied, num_outputs, GATED,
            )  # fmt: skip

    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WIDTH, 16]
    )
    phase = 0
    stage = 0
    before = STAGES - 1
    fetched = STAGES - 1
    while expert < EXPERTS:
        # What is fetched is less than a tile ahead of what is multiplied: at this point, both are in the same one.
        own_first = first
        own_end = end
        first_output = block * OUTPUTS
        sums = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
        for _ in range(ROUNDS):
            mbarrier.wait(ready.index(stage), phase)
            if x_rows is None:
                fence_async_shared()  # rows were written by threads, and are read by tensor cores
            sums = warpgroup_mma(rows.index(stage), weights.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            # Every warp is done with the buffers of the round before, so they can be filled again.
            meet()
            if fetched == ROUNDS:
                expert, begin, end, own, first, block, first_weight, sources = _settle(
                    starts, sorted_pairs, expert, begin, end, own + programs, copy_row, num_outputs, num_inputs,
                    EXPERTS, top_k, ROWS, OUTPUTS, HALVES,
                )  # fmt: skip
                fetched = 0
            if expert < EXPERTS:
                _fetch(
                    before, fetched * DEPTH, first, first_weight, end, sources, copy_row, depth, inputs, x_rows,
                    w_rows, ready, rows, copied, num_outputs, GATED,
                )  # fmt: skip
            fetched += 1
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        _finish(sums, results, own_first, own_end, first_output, num_outputs, GATED, PIECES, WARPS)


def hopper_grouped_matmul(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    results: torch.Tensor,
    order: Order,
    *,
    tile: HopperTile,
    gated: Activation | None = None,
) -> None:
    """As `moe_grouped.grouped_matmul`."""
    experts, matrix_rows, num_inputs = weights.shape
    num_outputs = matrix_rows if gated is None else matrix_rows // 2
    reason = tile.unfit(num_inputs, num_outputs, gated=gated is not None)
    assert reason is None, reason
    layout = shared_layout(tile.outputs, DEPTH, weights.dtype)
    w_rows = TensorDescriptor(
        weights, [experts * matrix_rows, num_inputs], [num_inputs, 1], [tile.outputs, DEPTH], layout
    )
    x_rows = None
    if tile.rows_in_bulk and gated is None:
        x_rows = TensorDescriptor(inputs, list(inputs.shape), [num_inputs, 1], [tile.rows, DEPTH], layout)
    num_sms = target_of(weights.device).num_sms
    dependent(_hopper_grouped_kernel, (num_sms,), inputs.device)(
        inputs, x_rows, w_rows, results, order.sorted_pairs, order.starts, num_outputs, num_inputs, experts,
        order.top_k, GATED=gated, ROWS=tile.rows, OUTPUTS=tile.outputs, DEPTH=DEPTH, STAGES=tile.stages,
        PIECES=tile.pieces, WARPS=tile.num_warps, num_warps=tile.num_warps,
    )  # fmt: skip
