"""Matrix products of some dozens of rows for Hopper in Gluon: as fast as weights can be read. Weights and rows come by
TMA into a ring of buffers, tensor cores follow a round behind; under a dependent launch a program has its ring full of
weights before it waits for the kernel ahead. A product may be cut along its depth, and its reader adds up the parts."""

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.activation import Activation, activate
from twostroke.backends.cuda.kernels.gluon_layouts import shared_layout
from twostroke.backends.cuda.kernels.gluon_names import meet
from twostroke.backends.cuda.kernels.product import DEPTH
from twostroke.backends.cuda.kernels.product_tiles import MAX_ROWS, ProductTile, copied_rows, padded_rows
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.whole_numbers import cdiv
from twostroke.backends.cuda.native import rows_to_read


@gluon.jit
def _fetch_weights(w_rows, first_output, outputs, column, ready, weights, ups, wanted, GATED: gl.constexpr):
    tma.async_copy_global_to_shared(w_rows, [first_output, column], ready, weights, pred=wanted)
    if GATED is not None:
        tma.async_copy_global_to_shared(w_rows, [outputs + first_output, column], ready, ups, pred=wanted)


@gluon.jit
def _fetch_rows(x_rows, first_row, column, ready, rows, wanted):
    """Rows of the buffer beyond the copied hold anything: no sum of another row reads them, and theirs are dropped."""
    own = rows.slice(0, x_rows.block_shape[0])
    tma.async_copy_global_to_shared(x_rows, [first_row, column], ready, own, pred=wanted)


@gluon.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_rows, w_rows, out, num_rows, outputs,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr, ROUNDS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, GATED: gl.constexpr, EVEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    first_output = gl.program_id(0) * OUTPUTS
    split = gl.program_id(1)
    first_row = gl.program_id(2) * ROWS
    begin = split * (ROUNDS * DEPTH)
    ROW_GROUPS: gl.constexpr = 4 if ROWS < 128 or WARPS < 8 else 8
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[ROW_GROUPS, WARPS // ROW_GROUPS],
        instr_shape=[16, OUTPUTS // (WARPS // ROW_GROUPS), 16],
    )  # fmt: skip
    rows = gl.allocate_shared_memory(x_rows.dtype, [STAGES, ROWS, DEPTH], x_rows.layout)
    weights = gl.allocate_shared_memory(w_rows.dtype, [STAGES, OUTPUTS, DEPTH], w_rows.layout)
    ups = weights  # without a gate there are none, and this is never used
    if GATED is not None:
        ups = gl.allocate_shared_memory(w_rows.dtype, [STAGES, OUTPUTS, DEPTH], w_rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    MATRICES: gl.constexpr = 1 if GATED is None else 2
    ROUND_BYTES: gl.constexpr = x_rows.block_type.nbytes + w_rows.block_type.nbytes * MATRICES

    # Weights never change, so they are on their way before the kernel ahead has ended.
    for stage in gl.static_range(STAGES):
        mbarrier.expect(ready.index(stage), ROUND_BYTES)
        _fetch_weights(
            w_rows, first_output, outputs, begin + stage * DEPTH, ready.index(stage), weights.index(stage),
            ups.index(stage), True, GATED,
        )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for stage in gl.static_range(STAGES):
        _fetch_rows(x_rows, first_row, begin + stage * DEPTH, ready.index(stage), rows.index(stage), True)

    sums = gl.zeros([ROWS, OUTPUTS], gl.float32, SUMS)
    up_sums = gl.zeros([ROWS, OUTPUTS], gl.float32, SUMS)
    stage = 0
    phase = 0
    before = STAGES - 1
    for j in range(ROUNDS):
        mbarrier.wait(ready.index(stage), phase)
        sums = warpgroup_mma(rows.index(stage), weights.index(stage).permute((1, 0)), sums, is_async=True)
        if GATED is not None:
            up_sums = warpgroup_mma(rows.index(stage), ups.index(stage).permute((1, 0)), up_sums, is_async=True)
            sums, up_sums = warpgroup_mma_wait(2, deps=[sums, up_sums])
        else:
            sums = warpgroup_mma_wait(1, deps=[sums])
        # The round before is done with its buffers, so they can be filled again.
        ahead = j + (STAGES - 1)
        wanted = (j > 0) & (ahead < ROUNDS)
        column = begin + ahead * DEPTH
        mbarrier.expect(ready.index(before), ROUND_BYTES, pred=wanted)
        _fetch_weights(
            w_rows, first_output, outputs, column, ready.index(before), weights.index(before), ups.index(before),
            wanted, GATED,
        )  # fmt: skip
        _fetch_rows(x_rows, first_row, column, ready.index(before), rows.index(before), wanted)
        before = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if GATED is not None:
        sums, up_sums = warpgroup_mma_wait(0, deps=[sums, up_sums])
        sums = activate(sums, up_sums, GATED)
    else:
        sums = warpgroup_mma_wait(0, deps=[sums])
    # Sums change their layout by way of the buffers, which slower warps may still be multiplying from.
    meet()

    WIDE: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    ACROSS: gl.constexpr = min(32, OUTPUTS // WIDE)
    STORE: gl.constexpr = gl.BlockedLayout([1, WIDE], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    found = gl.convert_layout(sums.to(out.dtype.element_ty), STORE)
    row = gl.expand_dims(first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE)), 1)
    column = gl.expand_dims(first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, STORE)), 0)
    held = row < num_rows
    if not EVEN:
        held = held & (column < outputs)
    gl.store(out + (split * num_rows + row) * outputs + column, found, mask=held)


def product(
    x: torch.Tensor,  # [num_rows, width], rows contiguous
    weight: torch.Tensor,  # [outputs, width], contiguous; with gated [2 * outputs, width]: gate, then up
    out: torch.Tensor,  # [num_rows, outputs], or [splits, num_rows, outputs] float32 to be added up; contiguous
    *,
    tile: ProductTile,
    gated: Activation | None = None,
) -> None:
    """out = x @ weight.T, gated if asked; for 1 to MAX_ROWS rows, or so many in each of some blocks."""
    num_rows, width = x.shape
    outputs = out.shape[-1]
    rounds = width // DEPTH // tile.splits
    of_block = tile.rows_of_block(num_rows)
    assert 1 <= of_block <= MAX_ROWS and rounds * DEPTH * tile.splits == width and out.is_contiguous()
    assert (tile.splits == 1) == (out.dim() == 2) and (gated is None or tile.splits == 1)
    assert 1 <= tile.stages <= rounds
    box = copied_rows(of_block)
    x_layout, w_layout = (shared_layout(rows, DEPTH, x.dtype) for rows in (box, tile.outputs))
    x_rows = TensorDescriptor(
        x, [rows_to_read(x, box * tile.row_blocks), width], [x.stride(0), 1], [box, DEPTH], x_layout
    )
    w_rows = TensorDescriptor(weight, list(weight.shape), [width, 1], [tile.outputs, DEPTH], w_layout)
    dependent(_product_kernel, (cdiv(outputs, tile.outputs), tile.splits, tile.row_blocks), x.device)(
        x_rows,
        w_rows,
        out,
        num_rows,
        outputs,
        ROWS=padded_rows(of_block),
        OUTPUTS=tile.outputs,
        DEPTH=DEPTH,
        ROUNDS=rounds,
        STAGES=tile.stages,
        WARPS=tile.num_warps,
        GATED=gated,
        EVEN=outputs % tile.outputs == 0,
        num_warps=tile.num_warps,
    )
