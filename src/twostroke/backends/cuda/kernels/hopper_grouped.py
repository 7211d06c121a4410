"""The experts' matrix products for Hopper in Gluon: a program an SM walks over tiles of (expert, rows, outputs).
Weights come by TMA into a ring of buffers that runs on from tile to tile: one tile's results are stored while the next
one's weights arrive. Under a dependent launch the ring may be filled before the wait, for the tile that a program most
likely begins with. Rows are as `moe_routing.py` sorts them; `moe_grouped.py` takes every other device and shape."""

# ruff: noqa: N803, N806, SIM108  (Gluon wants its branches in full)
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,no-redef"

from __future__ import annotations

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.activation import Activation, activate
from twostroke.backends.cuda.kernels.gluon_layouts import shared_layout
from twostroke.backends.cuda.kernels.gluon_names import meet
from twostroke.backends.cuda.kernels.grouped_tiles import DEPTH, HopperTile
from twostroke.backends.cuda.kernels.target import dependent, target_of


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
def _fetch_weights(
    w_rows, first_weight, column, ready, gates, ups, wanted, num_outputs: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    HALVES: gl.constexpr = 1 if GATED is None else 2
    mbarrier.expect(ready, w_rows.block_type.nbytes * HALVES, pred=wanted)
    tma.async_copy_global_to_shared(w_rows, [first_weight, column], ready, gates, pred=wanted)
    if GATED is not None:
        tma.async_copy_global_to_shared(w_rows, [first_weight + num_outputs, column], ready, ups, pred=wanted)


@gluon.jit
def _fetch_rows(x_rows, inputs, sources, is_row, depth, first, column, ready, rows):
    """By TMA, or row by row: then every thread arrives at `ready` when what it copied is there."""
    if x_rows is not None:
        mbarrier.expect(ready, x_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(x_rows, [first, column], ready, rows)
    else:
        pointers = inputs + (gl.expand_dims(sources, 1) + gl.expand_dims(column + depth, 0))
        async_copy.async_copy_global_to_shared(rows, pointers, mask=gl.expand_dims(is_row, 1))
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _halves(sums, WEIGHTS_FIRST: gl.constexpr):
    """The first and the second half of the outputs, which lie in the same threads."""
    if WEIGHTS_FIRST:
        halves = sums.reshape([2, sums.shape[0] // 2, sums.shape[1]]).permute((1, 2, 0))
    else:
        halves = sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]).permute((0, 2, 1))
    return gl.split(halves)


@gluon.jit
def _store(
    found, results, first, end, first_output, num_outputs: gl.constexpr, WEIGHTS_FIRST: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Eight outputs of a row at a time, of the rows there are."""
    ROW_DIM: gl.constexpr = 1 if WEIGHTS_FIRST else 0
    ROWS: gl.constexpr = found.shape[ROW_DIM]
    OUTPUTS: gl.constexpr = found.shape[1 - ROW_DIM]
    ACROSS: gl.constexpr = min(32, OUTPUTS // 8)
    if WEIGHTS_FIRST:
        STORE: gl.constexpr = gl.BlockedLayout([8, 1], [ACROSS, 32 // ACROSS], [1, WARPS], [0, 1])
    else:
        STORE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    found = gl.convert_layout(found.to(results.dtype.element_ty), STORE)
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1 - ROW_DIM, STORE))
    output = first_output + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(ROW_DIM, STORE))
    at = gl.expand_dims(row.to(gl.int64) * num_outputs, 1 - ROW_DIM) + gl.expand_dims(output, ROW_DIM)
    gl.store(results + at, found, mask=gl.expand_dims(row < end, 1 - ROW_DIM))


@gluon.jit
def _hopper_grouped_kernel(
    inputs, x_rows, w_rows, results, sorted_pairs, starts,
    num_outputs: gl.constexpr, num_inputs: gl.constexpr, EXPERTS: gl.constexpr, top_k: gl.constexpr,
    GATED: gl.constexpr, ROWS: gl.constexpr, OUTPUTS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    WEIGHTS_FIRST: gl.constexpr, PIECES: gl.constexpr, WARPS: gl.constexpr, GUESSES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """GATED: inputs are the tokens' own, gate and up become one result. Else inputs are rows in order."""
    BLOCKS: gl.constexpr = num_outputs // OUTPUTS
    ROUNDS: gl.constexpr = num_inputs // DEPTH
    HALVES: gl.constexpr = 1 if GATED is None else 2
    MATRIX_ROWS: gl.constexpr = num_outputs * HALVES
    WIDTH: gl.constexpr = OUTPUTS * HALVES
    GATHERED: gl.constexpr = GATED is not None
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

    guess = program // BLOCKS * MATRIX_ROWS + program % BLOCKS * OUTPUTS
    if PDL and GUESSES:
        # Weights never change, so they are on their way before the kernel ahead has ended: as if every expert had one
        # tile of rows, which holds for nearly all when there are dozens of tokens.
        for stage in gl.static_range(STAGES - 1):
            _fetch_weights(
                w_rows, guess, stage * DEPTH, ready.index(stage), copied.index(stage * HALVES),
                copied.index(stage * HALVES + HALVES - 1), True, num_outputs, GATED,
            )  # fmt: skip
    if PDL:
        # The trigger comes after the wait: the plain kernel, which may follow, reads `starts` before its own.
        gdc_wait()
        gdc_launch_dependents()
    expert, begin, end, own = _walk(
        starts, gl.to_tensor(0), gl.load(starts), gl.load(starts + 1), program, EXPERTS, ROWS, BLOCKS
    )  # fmt: skip
    first, block = _cut(begin, end, own, ROWS)
    first_weight = expert * MATRIX_ROWS + block * OUTPUTS
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (DEPTH // 8), DEPTH // 8], [WARPS, 1], [1, 0])
    copy_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    depth = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, COPY))
    sources = _sources(sorted_pairs, first, end, copy_row, num_inputs, top_k, GATHERED)

    phase = 0
    is_missed = expert < EXPERTS
    if PDL and GUESSES:
        is_missed = is_missed & (first_weight != guess)
        if is_missed | (expert == EXPERTS):
            # What has come is thrown away, and every barrier goes on to its next phase.
            for stage in gl.static_range(STAGES - 1):
                mbarrier.arrive(ready.index(stage), count=ARRIVALS)
            mbarrier.arrive(ready.index(STAGES - 1), count=1 + ARRIVALS)
            for stage in gl.static_range(STAGES):
                mbarrier.wait(ready.index(stage), 0)
            meet()
            phase = 1
    if expert < EXPERTS:
        for stage in gl.static_range(STAGES - 1):
            _fetch_weights(
                w_rows, first_weight, stage * DEPTH, ready.index(stage), copied.index(stage * HALVES),
                copied.index(stage * HALVES + HALVES - 1), is_missed, num_outputs, GATED,
            )  # fmt: skip
            _fetch_rows(
                x_rows, inputs, sources, first + copy_row < end, depth, first, stage * DEPTH, ready.index(stage),
                rows.index(stage),
            )  # fmt: skip

    if WEIGHTS_FIRST:
        SUMS: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, ROWS, 16]
        )
    else:
        SUMS: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, WIDTH, 16]
        )
    stage = 0
    before = STAGES - 1
    fetched = STAGES - 1
    while expert < EXPERTS:
        # What is fetched is less than a tile ahead of what is multiplied: at this point, both are in the same one.
        own_first = first
        own_end = end
        first_output = block * OUTPUTS
        if WEIGHTS_FIRST:
            sums = gl.zeros([WIDTH, ROWS], gl.float32, SUMS)
        else:
            sums = gl.zeros([ROWS, WIDTH], gl.float32, SUMS)
        for _ in range(ROUNDS):
            mbarrier.wait(ready.index(stage), phase)
            if x_rows is None:
                fence_async_shared()  # rows were written by threads, and are read by tensor cores
            if WEIGHTS_FIRST:
                sums = warpgroup_mma(weights.index(stage), rows.index(stage).permute((1, 0)), sums, is_async=True)
            else:
                sums = warpgroup_mma(rows.index(stage), weights.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            # Every warp is done with the buffers of the round before, so they can be filled again.
            meet()
            if fetched == ROUNDS:
                expert, begin, end, own = _walk(
                    starts, expert, begin, end, own + programs, EXPERTS, ROWS, BLOCKS
                )  # fmt: skip
                first, block = _cut(begin, end, own, ROWS)
                first_weight = expert * MATRIX_ROWS + block * OUTPUTS
                sources = _sources(sorted_pairs, first, end, copy_row, num_inputs, top_k, GATHERED)
                fetched = 0
            if expert < EXPERTS:
                column = fetched * DEPTH
                _fetch_weights(
                    w_rows, first_weight, column, ready.index(before), copied.index(before * HALVES),
                    copied.index(before * HALVES + HALVES - 1), True, num_outputs, GATED,
                )  # fmt: skip
                _fetch_rows(
                    x_rows, inputs, sources, first + copy_row < end, depth, first, column, ready.index(before),
                    rows.index(before),
                )  # fmt: skip
            fetched += 1
            before = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        if GATED is not None:
            gates, ups = _halves(sums, WEIGHTS_FIRST)
            found = activate(gates, ups, GATED)
        else:
            found = sums
        gl.static_assert(PIECES <= 2)
        if PIECES == 2:
            lower, upper = _halves(found, WEIGHTS_FIRST)
            _store(lower, results, own_first, own_end, first_output, num_outputs, WEIGHTS_FIRST, WARPS)
            _store(upper, results, own_first, own_end, first_output + OUTPUTS // 2, num_outputs, WEIGHTS_FIRST, WARPS)
        else:
            _store(found, results, own_first, own_end, first_output, num_outputs, WEIGHTS_FIRST, WARPS)


def hopper_grouped_matmul(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    results: torch.Tensor,
    sorted_pairs: torch.Tensor,
    starts: torch.Tensor,
    *,
    top_k: int,
    gated: Activation | None,
    tile: HopperTile,
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
    dependent(_hopper_grouped_kernel, (num_sms * tile.programs_per_sm,), inputs.device)(
        inputs,
        x_rows,
        w_rows,
        results,
        sorted_pairs,
        starts,
        num_outputs,
        num_inputs,
        experts,
        top_k,
        GATED=gated,
        ROWS=tile.rows,
        OUTPUTS=tile.outputs,
        DEPTH=DEPTH,
        STAGES=tile.stages,
        WEIGHTS_FIRST=tile.weights_first,
        PIECES=tile.pieces,
        WARPS=tile.num_warps,
        GUESSES=tile.guesses,
        num_warps=tile.num_warps,
    )
