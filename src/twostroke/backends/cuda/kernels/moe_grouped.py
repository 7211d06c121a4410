"""Matrix products of rows sorted by expert (see `moe_routing.py`), each tile of rows with its own expert's weights. The
grid is the most tiles there can be; programs beyond those there are end at once, so nothing waits for the host."""

# ruff: noqa: N803, SIM108  (compile-time constants are in capitals; Triton wants its branches in full)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.backends.cuda.kernels.gemv import prefetch_to_l2
from twostroke.backends.cuda.kernels.moe_decode import gated
from twostroke.backends.cuda.kernels.moe_routing import dot, dot_precision
from twostroke.backends.cuda.kernels.target import launch_options, target_of


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """What a program takes: so many rows, by so many outputs (of gate and of up, each), `depth` inputs at a time."""

    rows: int
    outputs: int
    depth: int
    num_warps: int
    num_stages: int
    weights_first: bool = False
    """Multiply weights by rows, not rows by weights: of few rows only this fills Hopper's matrix instruction."""
    bulk: bool = False
    """Weights (and rows that lie in order) come by the bulk copy engine, where the device and the shape allow."""
    gathered: bool = False
    """Of gate and up: tokens are copied into order first, so that their rows may come in bulk, too."""
    ahead: int = 0
    """Inputs of the first programs' weights asked for before the kernel ahead has ended, under a dependent launch."""


def choose_tile(num_rows: int, num_experts: int, *, gated: bool) -> GroupedTile:
    """By how many rows an expert gets on average; as `bench/cuda/moe.py` found best on an H200."""
    average = num_rows / num_experts
    if average <= 16:
        return GroupedTile(16, 64 if gated else 128, 64, num_warps=4, num_stages=5, weights_first=True)
    if average <= 48:
        return GroupedTile(32, 64, 128, num_warps=4, num_stages=3, weights_first=True)
    if average <= 96:
        return GroupedTile(64, 64 if gated else 128, 64, num_warps=4, num_stages=4)
    return GroupedTile(128, 128 if gated else 256, 64, num_warps=8, num_stages=3)


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Every expert that has rows may have a tile that is not full."""
    return min(num_rows, num_rows // tile_rows + num_experts)


@triton.jit
def _multiply(rows, weights, sums, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    if WEIGHTS_FIRST:
        return dot(weights, tl.trans(rows), sums, PRECISION)
    else:  # noqa: RET505  (without it Triton compiles both)
        return dot(rows, tl.trans(weights), sums, PRECISION)


@triton.jit
def _block(blocks, row, pointers, start, num_inputs: tl.constexpr, DEPTH: tl.constexpr):
    """Inputs from `start` on, by the bulk copy engine where there are `blocks`; what is beyond the last is zero."""
    if blocks is not None:
        found = blocks.load([row, start])
    elif num_inputs % DEPTH == 0:
        found = tl.load(pointers + start)
    else:
        found = tl.load(pointers + start, mask=(start + tl.arange(0, DEPTH) < num_inputs)[None, :], other=0.0)
    return found


@triton.jit
def _place(program, starts, experts: tl.constexpr, blocks: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Which expert a program works for (`experts`: none), the first of its rows, their end, and its block of outputs.
    Tiles of one expert that read the same weights are neighbours, so that L2 serves all but the first."""
    ids = tl.arange(0, PADDED)
    begins = tl.load(starts + ids, mask=ids < experts, other=0)
    ends = tl.load(starts + ids + 1, mask=ids < experts, other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    last_programs = tl.cumsum(tiles, 0) * blocks
    is_before = (last_programs <= program) & (ids < experts)
    expert = tl.sum(is_before.to(tl.int32), 0)
    own = program - tl.max(tl.where(is_before, last_programs, 0), 0)
    is_it = ids == expert
    own_tiles = tl.maximum(tl.sum(tl.where(is_it, tiles, 0), 0), 1)
    first = tl.sum(tl.where(is_it, begins, 0), 0) + own % own_tiles * ROWS
    return expert, first, tl.sum(tl.where(is_it, ends, 0), 0), own // own_tiles


@triton.jit(do_not_specialize=["num_guesses"])
def _grouped_kernel(
    inputs, input_blocks, weights, weight_blocks, results, sorted_pairs, starts, num_guesses,
    num_outputs: tl.constexpr, num_inputs: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr,
    GATED: tl.constexpr, SORTED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, EXPERTS_PADDED: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, AHEAD: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: gate and up become one result. SORTED: inputs are rows in order; else they are the tokens' own."""
    blocks: tl.constexpr = (num_outputs + OUTPUTS - 1) // OUTPUTS
    matrix_rows: tl.constexpr = 2 * num_outputs if GATED else num_outputs
    program = tl.program_id(0)
    if PDL and GATED:
        if AHEAD > 0 and program < num_guesses:
            # The routing is not known yet; the first experts, a tile each, are a good guess.
            guessed = (program // blocks) * matrix_rows + (program % blocks) * OUTPUTS + tl.arange(0, OUTPUTS)
            guessed_rows = weights + guessed[:, None].to(tl.int64) * num_inputs
            prefetch_to_l2(guessed_rows, AHEAD)
            prefetch_to_l2(guessed_rows + num_outputs * num_inputs, AHEAD)
        # The trigger comes after the wait: what starts then may read `starts`, as this very kernel does below.
        gdc_wait()
        gdc_launch_dependents()
    expert, first, end, block = _place(program, starts, experts, blocks, ROWS, EXPERTS_PADDED)
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows and outputs beyond the end read the first one again: no mask in the loop, and they are not stored.
    readable = tl.where(outputs < num_outputs, outputs, 0)
    first_weight = tl.minimum(expert, experts - 1) * matrix_rows
    own_weights = weights + first_weight.to(tl.int64) * num_inputs
    if PDL and not GATED:
        if AHEAD > 0:
            prefetch_to_l2(own_weights + readable[:, None] * num_inputs, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    if expert >= experts:
        return
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    if SORTED:
        sources = tl.where(is_row, rows, 0)
    else:
        sources = tl.load(sorted_pairs + rows, mask=is_row, other=0) // top_k
    depth = tl.arange(0, DEPTH)
    input_rows = inputs + sources[:, None].to(tl.int64) * num_inputs + depth[None, :]
    weight_rows = own_weights + readable[:, None] * num_inputs + depth[None, :]
    up_rows = weight_rows + num_outputs * num_inputs
    first_weight += block * OUTPUTS
    if WEIGHTS_FIRST:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, DEPTH):
        row_block = _block(input_blocks, first, input_rows, start, num_inputs, DEPTH)
        block_weights = _block(weight_blocks, first_weight, weight_rows, start, num_inputs, DEPTH)
        sums = _multiply(row_block, block_weights, sums, WEIGHTS_FIRST, PRECISION)
        if GATED:
            block_weights = _block(weight_blocks, first_weight + num_outputs, up_rows, start, num_inputs, DEPTH)
            up_sums = _multiply(row_block, block_weights, up_sums, WEIGHTS_FIRST, PRECISION)
    if GATED:
        sums = gated(sums, up_sums, GELU)
    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    targets = results + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    mask = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(targets, sums.to(results.dtype.element_ty), mask=mask)


def can_copy_in_bulk(matrix: torch.Tensor) -> bool:
    """Whether the bulk copy engine of Hopper and later reads this contiguous matrix."""
    target = target_of(matrix.device)
    has_engine = target.interpreted or target.capability >= (9, 0)
    return has_engine and matrix.data_ptr() % 16 == 0 and matrix.shape[-1] * matrix.element_size() % 16 == 0


def grouped_matmul(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    results: torch.Tensor,
    sorted_pairs: torch.Tensor,
    starts: torch.Tensor,
    *,
    top_k: int,
    gated: bool,
    tile: GroupedTile,
    gelu: bool = False,
    pdl: bool = False,
) -> None:
    """Gated: inputs [num_tokens, hidden] (or [num_pairs, hidden], sorted, where the tile wants them gathered), weights
    [experts, 2 * intermediate, hidden] (gate, then up) -> results [num_pairs, intermediate], sorted. Else: inputs
    [num_pairs, intermediate], sorted, weights [experts, hidden, intermediate] -> results [num_pairs, hidden], sorted.
    With `pdl` the second must directly follow the first, which lets it start no sooner than `starts` is written."""
    experts, matrix_rows, num_inputs = weights.shape
    num_outputs = matrix_rows // 2 if gated else matrix_rows
    num_pairs = sorted_pairs.shape[0]
    depth = min(tile.depth, max(16, triton.next_power_of_2(num_inputs)))
    blocks = triton.cdiv(num_outputs, tile.outputs)
    is_sorted = tile.gathered or not gated
    input_blocks = weight_blocks = None
    if tile.bulk and can_copy_in_bulk(weights):
        weight_blocks = TensorDescriptor.from_tensor(weights.view(-1, num_inputs), [tile.outputs, depth])
        if is_sorted:
            input_blocks = TensorDescriptor.from_tensor(inputs, [tile.rows, depth])
    # As many as run at once; fewer where too few pairs make it likely that an expert has none, or blocks are not whole.
    num_guesses = 2 * target_of(inputs.device).num_sms if num_pairs >= 4 * experts else 0
    if num_outputs % tile.outputs:
        num_guesses = 0
    _grouped_kernel[(blocks * most_tiles(num_pairs, experts, tile.rows),)](
        inputs, input_blocks, weights, weight_blocks, results, sorted_pairs, starts, min(num_guesses, experts * blocks),
        num_outputs, num_inputs, experts, top_k, GATED=gated, SORTED=is_sorted, GELU=gelu, ROWS=tile.rows,
        OUTPUTS=tile.outputs, DEPTH=depth, EXPERTS_PADDED=triton.next_power_of_2(experts),
        WEIGHTS_FIRST=tile.weights_first, AHEAD=min(tile.ahead, num_inputs) if pdl else 0,
        PRECISION=dot_precision(inputs.dtype), PDL=pdl, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **launch_options(pdl),
    )  # fmt: skip
