"""Matrix products of rows sorted by expert (see `moe_routing.py`), each tile of rows with its own expert's weights. The
grid is the most tiles there can be; programs beyond those there are end at once, so nothing waits for the host."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.backends.cuda.kernels.activation import Gate, activate, activate_alone
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix, parts_of, stored_block
from twostroke.backends.cuda.kernels.expert_tiles import GroupedTile
from twostroke.backends.cuda.kernels.moe_routing import Order, dot, dot_precision
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.models.mlp_spec import Alone


def most_tiles(num_rows: int, num_experts: int, tile_rows: int) -> int:
    """Every expert that has rows may have a tile that is not full."""
    return min(num_rows, num_rows // tile_rows + num_experts)


@triton.jit
def _multiply(rows, weights, sums, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    if WEIGHTS_FIRST:
        return dot(weights, tl.trans(rows), sums, PRECISION)
    else:  # without it Triton compiles both
        return dot(rows, tl.trans(weights), sums, PRECISION)


@triton.jit
def _add_bias(sums, bias, WEIGHTS_FIRST: tl.constexpr):
    """bias: pointers [outputs]"""
    values = tl.load(bias).to(tl.float32)
    if WEIGHTS_FIRST:
        return sums + values[:, None]
    else:
        return sums + values[None, :]


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
def place_of(program, starts, experts: tl.constexpr, blocks: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
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


@triton.jit
def _grouped_kernel(
    inputs, input_blocks, weights, weight_blocks, highs, scales, offsets, tops, bias, results, sorted_pairs, starts,
    num_outputs: tl.constexpr, num_inputs: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr,
    GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr, WEIGHTS_FIRST: tl.constexpr, PRECISION: tl.constexpr, FORM: tl.constexpr,
    HAS_UP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: inputs are the tokens' own, gate and up become one result, or what is activated alone. Else inputs are
    rows in order. FORM: of weights in few bits; None: they are floats."""
    blocks: tl.constexpr = (num_outputs + OUTPUTS - 1) // OUTPUTS
    matrix_rows: tl.constexpr = 2 * num_outputs if HAS_UP else num_outputs
    program = tl.program_id(0)
    # The trigger comes after the wait: what starts then may read `starts`, as this very kernel does below.
    wait_and_start_next(PDL and GATED is not None)
    expert, first, end, block = place_of(program, starts, experts, blocks, ROWS, EXPERTS_PADDED)
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows and outputs beyond the end read the first one again: no mask in the loop, and they are not stored.
    readable = tl.where(outputs < num_outputs, outputs, 0)
    first_weight = tl.minimum(expert, experts - 1) * matrix_rows
    own_weights = weights + first_weight.to(tl.int64) * num_inputs
    wait_and_start_next(PDL and GATED is None)
    if expert >= experts:
        return
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    if GATED is not None:
        sources = tl.load(sorted_pairs + rows, mask=is_row, other=0) // top_k
    else:
        sources = tl.where(is_row, rows, 0)
    depth = tl.arange(0, DEPTH)
    input_rows = inputs + sources[:, None].to(tl.int64) * num_inputs + depth[None, :]
    weight_rows = own_weights + readable[:, None] * num_inputs + depth[None, :]
    up_rows = weight_rows + num_outputs * num_inputs
    stored_rows = first_weight.to(tl.int64) + readable
    first_weight += block * OUTPUTS
    if WEIGHTS_FIRST:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, DEPTH):
        row_block = _block(input_blocks, first, input_rows, start, num_inputs, DEPTH)
        if FORM is None:
            block_weights = _block(weight_blocks, first_weight, weight_rows, start, num_inputs, DEPTH)
        else:
            block_weights = stored_block(
                weights, highs, scales, offsets, tops, stored_rows, start, num_inputs, FORM, OUTPUTS, DEPTH
            ).to(row_block.dtype)
        sums = _multiply(row_block, block_weights, sums, WEIGHTS_FIRST, PRECISION)
        if HAS_UP:
            if FORM is None:
                block_weights = _block(weight_blocks, first_weight + num_outputs, up_rows, start, num_inputs, DEPTH)
            else:
                block_weights = stored_block(
                    weights, highs, scales, offsets, tops, stored_rows + num_outputs, start, num_inputs, FORM, OUTPUTS,
                    DEPTH,
                ).to(row_block.dtype)  # fmt: skip
            up_sums = _multiply(row_block, block_weights, up_sums, WEIGHTS_FIRST, PRECISION)
    if bias is not None:
        own_bias = bias + tl.minimum(expert, experts - 1) * matrix_rows + readable
        sums = _add_bias(sums, own_bias, WEIGHTS_FIRST)
        if HAS_UP:
            up_sums = _add_bias(up_sums, own_bias + num_outputs, WEIGHTS_FIRST)
    if HAS_UP:
        sums = activate(sums, up_sums, GATED)
    elif GATED is not None:
        sums = activate_alone(sums, GATED)
    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    targets = results + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    mask = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(targets, sums.to(results.dtype.element_ty), mask=mask)


def can_copy_in_bulk(matrix: torch.Tensor) -> bool:
    """Whether the bulk copy engine of Hopper and later reads this contiguous matrix."""
    is_aligned = matrix.data_ptr() % 16 == 0 and matrix.shape[-1] * matrix.element_size() % 16 == 0
    return target_of(matrix.device).has_bulk_copies and is_aligned


def grouped_matmul(
    inputs: torch.Tensor,
    weights: torch.Tensor | ExpertMatrix,
    results: torch.Tensor,
    order: Order,
    *,
    tile: GroupedTile,
    bias: torch.Tensor | None = None,
    gated: Gate | Alone | None = None,
    has_up: bool | None = None,
) -> None:
    """Gated: inputs [num_tokens, hidden], weights [experts, 2 * intermediate, hidden] (gate, then up) -> results
    [num_pairs, intermediate], sorted. Else: inputs [num_pairs, intermediate], sorted, weights
    [experts, hidden, intermediate] -> results [num_pairs, hidden], sorted. bias: [experts, the weights' rows]. Without
    `has_up` (None: gated ones have) there is no gate in the first: weights [experts, intermediate, hidden]. The
    second must directly follow the first, which lets it start no sooner than `order.starts` is written."""
    parts, form = parts_of(weights)
    (experts, matrix_rows, _), num_inputs = parts.data.shape, inputs.shape[1]
    has_up = gated is not None if has_up is None else has_up
    num_outputs = matrix_rows // 2 if has_up else matrix_rows
    tile = replace(tile, depth=min(tile.depth, max(16 if form is None else 32, next_power_of_2(num_inputs))))
    stage_bytes = tile.stage_bytes(gated=has_up, element_size=inputs.element_size())
    num_stages = target_of(inputs.device).stages(tile.num_stages, stage_bytes)
    input_blocks = weight_blocks = None
    if tile.bulk and form is None and can_copy_in_bulk(parts.data):
        weight_blocks = TensorDescriptor.from_tensor(parts.data.view(-1, num_inputs), [tile.outputs, tile.depth])
        if gated is None:
            input_blocks = TensorDescriptor.from_tensor(inputs, [tile.rows, tile.depth])
    programs = cdiv(num_outputs, tile.outputs) * most_tiles(len(order.sorted_pairs), experts, tile.rows)
    dependent(_grouped_kernel, (programs,), inputs.device)(
        inputs, input_blocks, parts.data, weight_blocks, parts.highs, parts.scales, parts.offsets, parts.tops, bias,
        results, order.sorted_pairs, order.starts, num_outputs, num_inputs, experts, order.top_k, GATED=gated,
        ROWS=tile.rows, OUTPUTS=tile.outputs, DEPTH=tile.depth, EXPERTS_PADDED=next_power_of_2(experts),
        WEIGHTS_FIRST=tile.weights_first, PRECISION=dot_precision(inputs.dtype), FORM=form, HAS_UP=has_up,
        num_warps=tile.num_warps, num_stages=num_stages,
    )  # fmt: skip
