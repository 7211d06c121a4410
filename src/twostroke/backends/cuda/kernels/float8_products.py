"""Rows times weights in float8, of one matrix or of rows sorted by expert: rows have a scale for 128 inputs, weights
one for a group of inputs or for a whole row. The matrix instruction sums one group, in fewer bits than float32 has;
those sums are scaled and added up in float32. Knows nothing of how weights are held (`float8_room.py`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from twostroke.backends.cuda.kernels.activation import Gate, activate, activate_alone
from twostroke.backends.cuda.kernels.eight_bits import E4M3, LARGEST, LEAST_SCALE
from twostroke.backends.cuda.kernels.float8_tiles import ROW_GROUP, Float8Tile
from twostroke.backends.cuda.kernels.moe_grouped import can_copy_in_bulk, most_tiles, place_of
from twostroke.backends.cuda.kernels.moe_routing import Order
from twostroke.backends.cuda.kernels.target import dependent, target_of
from twostroke.backends.cuda.kernels.turns import start_next_and_wait, wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2
from twostroke.models.mlp_spec import Alone

NEIGHBOURS = tl.constexpr(8)
"""Blocks of rows that take turns with the same weights, so that L2 serves both."""


class Float8Rows(NamedTuple):
    data: torch.Tensor  # uint8, bits of e4m3 [rows, padded width]
    scales: torch.Tensor  # float32 [groups, rows]


class Float8Weights(NamedTuple):
    data: torch.Tensor  # uint8, bits of e4m3 [matrices, rows, width, which may be padded]
    scales: torch.Tensor  # float32 [matrices, groups, rows], of any strides
    group: int
    """Inputs that share a scale; 0: all of a row do."""


def quantise_groups(x: torch.Tensor, rows: Float8Rows) -> None:
    """x: [num_rows, width], rows contiguous: a scale for each 128 inputs, of the largest. More rows may follow."""
    num_rows, width = x.shape
    padded = rows.data.shape[1]
    block = next_power_of_2(padded)
    dependent(_quantise_groups, (num_rows,), x.device)(
        x, rows.data.view(E4M3), rows.scales, x.stride(0), rows.scales.stride(0), WIDTH=width, PADDED=padded,
        BLOCK=block, GROUP=ROW_GROUP, LARGEST=LARGEST, LEAST=LEAST_SCALE, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


@triton.jit(do_not_specialize=["scale_stride"])
def _quantise_groups(
    x, out, scales, x_stride, scale_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, LARGEST: tl.constexpr, LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inputs = tl.arange(0, BLOCK)
    groups: tl.constexpr = BLOCK // GROUP
    start_next_and_wait(PDL)
    value = tl.load(x + row * x_stride + inputs, mask=inputs < WIDTH, other=0.0).to(tl.float32)
    by_group = tl.reshape(value, [groups, GROUP])
    scale = tl.maximum(tl.max(tl.abs(by_group), 1) / LARGEST, LEAST)
    group = tl.arange(0, groups)
    tl.store(scales + group.to(tl.int64) * scale_stride + row, scale, mask=group < PADDED // GROUP)
    rounded = tl.reshape(by_group / scale[:, None], [BLOCK]).to(out.dtype.element_ty)
    tl.store(out + row * PADDED + inputs, rounded, mask=inputs < PADDED)


@triton.jit
def _dense_place(program, num_rows, blocks: tl.constexpr, ROWS: tl.constexpr):
    """The first row of a program, and its block of outputs."""
    row_blocks = (num_rows + ROWS - 1) // ROWS
    together = NEIGHBOURS * blocks
    run = program // together * NEIGHBOURS
    height = tl.minimum(row_blocks - run, NEIGHBOURS)
    return (run + program % together % height) * ROWS, program % together // height


@triton.jit
def _weight_block(blocks, row, pointers, start, width: tl.constexpr, DEPTH: tl.constexpr):
    """Inputs from `start` on; what is beyond the last is zero."""
    if blocks is not None:
        found = blocks.load([row, start])
    elif width % DEPTH == 0:
        found = tl.load(pointers + start)
    else:
        found = tl.load(pointers + start, mask=(start + tl.arange(0, DEPTH) < width)[None, :], other=0.0)
    return found


@triton.jit
def _scaled(rows, weights, row_scale, weight_scales, sums, HAS_GROUPS: tl.constexpr):
    """Sums with one group's more."""
    found = tl.dot(rows, tl.trans(weights), out_dtype=tl.float32)
    if HAS_GROUPS:
        return sums + found * (row_scale[:, None] * tl.load(weight_scales)[None, :])
    else:
        return sums + found * row_scale[:, None]


@triton.jit(do_not_specialize=["num_rows", "row_stride"])
def _float8_kernel(
    rows, row_blocks, row_scales, row_stride, weights, weight_blocks, weight_scales, bias, results, sorted_pairs,
    starts, num_rows, group_stride, scale_stride, matrix_stride, num_outputs: tl.constexpr, padded: tl.constexpr,
    width: tl.constexpr, experts: tl.constexpr, top_k: tl.constexpr, GROUP: tl.constexpr, ROW_GROUP: tl.constexpr,
    GATED: tl.constexpr, HAS_UP: tl.constexpr, GATHERS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """experts: 0 of one matrix. GATHERS: rows are those of tokens, of which each has `top_k` places in the order."""
    DEPTH: tl.constexpr = GROUP if GROUP > 0 else ROW_GROUP
    # Rows end in zeros, of which weights that lie as they are stored have neither numbers nor scales.
    inputs: tl.constexpr = (width + DEPTH - 1) // DEPTH * DEPTH
    blocks: tl.constexpr = (num_outputs + OUTPUTS - 1) // OUTPUTS
    matrix_rows: tl.constexpr = 2 * num_outputs if HAS_UP else num_outputs
    wait_and_start_next(PDL)
    expert = 0
    if experts > 0:
        expert, first, end, block = place_of(tl.program_id(0), starts, experts, blocks, ROWS, EXPERTS_PADDED)
        if expert >= experts:
            return
    else:
        first, block = _dense_place(tl.program_id(0), num_rows, blocks, ROWS)
        end = num_rows
    outputs = block * OUTPUTS + tl.arange(0, OUTPUTS)
    # Rows and outputs beyond the end read the first one again, and they are not stored.
    readable = tl.where(outputs < num_outputs, outputs, 0)
    own = first + tl.arange(0, ROWS)
    is_row = own < end
    sources = tl.load(sorted_pairs + own, mask=is_row, other=0) // top_k if GATHERS else tl.where(is_row, own, 0)
    depth = tl.arange(0, DEPTH)
    row_pointers = rows + sources[:, None].to(tl.int64) * padded + depth[None, :]
    own_scales = row_scales + sources
    first_weight = expert * matrix_rows
    weight_rows = first_weight + readable
    pointers = weights + weight_rows[:, None].to(tl.int64) * width + depth[None, :]
    scales = weight_scales + expert * matrix_stride + readable * scale_stride
    first_weight += block * OUTPUTS
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, DEPTH):
        if row_blocks is not None:
            row_block = row_blocks.load([first, start])
        else:
            row_block = tl.load(row_pointers + start)
        row_scale = tl.load(own_scales + start // ROW_GROUP * row_stride)
        group = scales + start // DEPTH * group_stride
        found = _weight_block(weight_blocks, first_weight, pointers, start, width, DEPTH)
        sums = _scaled(row_block, found, row_scale, group, sums, GROUP > 0)
        if HAS_UP:
            found = _weight_block(
                weight_blocks, first_weight + num_outputs, pointers + num_outputs * width, start, width, DEPTH
            )
            up_sums = _scaled(row_block, found, row_scale, group + num_outputs * scale_stride, up_sums, GROUP > 0)
    if GROUP == 0:
        sums *= tl.load(scales)[None, :]
        if HAS_UP:
            up_sums *= tl.load(scales + num_outputs * scale_stride)[None, :]
    if bias is not None:
        sums += tl.load(bias + weight_rows).to(tl.float32)[None, :]
        if HAS_UP:
            up_sums += tl.load(bias + weight_rows + num_outputs).to(tl.float32)[None, :]
    if HAS_UP:
        sums = activate(sums, up_sums, GATED)
    elif GATED is not None:
        sums = activate_alone(sums, GATED)
    targets = results + own[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    mask = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(targets, sums.to(results.dtype.element_ty), mask=mask)


def float8_matmul(
    rows: Float8Rows,
    weights: Float8Weights,
    results: torch.Tensor,
    *,
    tile: Float8Tile,
    order: Order | None = None,
    gathers: bool = False,
    bias: torch.Tensor | None = None,
    gated: Gate | Alone | None = None,
    has_up: bool | None = None,
) -> None:
    """results: [num_rows, outputs], contiguous. `order`: of experts, whose weights are several matrices; `gathers`:
    rows are tokens', not yet in that order. bias: [matrices, the weights' rows]. `has_up`: see `grouped_matmul`."""
    (matrices, matrix_rows, width), (num_rows, padded) = weights.data.shape, rows.data.shape
    assert results.is_contiguous()
    has_up = gated is not None if has_up is None else has_up
    num_outputs = matrix_rows // 2 if has_up else matrix_rows
    depth, device = weights.group or ROW_GROUP, rows.data.device
    num_stages = target_of(device).stages(tile.num_stages, tile.stage_bytes(depth, gated=has_up))
    own, theirs = rows.data.view(E4M3), weights.data.view(E4M3)
    row_blocks = weight_blocks = None
    if can_copy_in_bulk(theirs):
        weight_blocks = TensorDescriptor.from_tensor(theirs.view(-1, width), [tile.outputs, depth])
        row_blocks = None if gathers else TensorDescriptor.from_tensor(own, [tile.rows, depth])
    tiles = cdiv(num_rows, tile.rows) if order is None else most_tiles(len(results), matrices, tile.rows)
    pairs, starts, top_k = (None, None, 1) if order is None else (order.sorted_pairs, order.starts, order.top_k)
    matrix_stride, group_stride, scale_stride = weights.scales.stride()
    dependent(_float8_kernel, (cdiv(num_outputs, tile.outputs) * tiles,), device)(
        own, row_blocks, rows.scales, rows.scales.stride(0), theirs, weight_blocks, weights.scales, bias, results,
        pairs, starts, num_rows, group_stride, scale_stride, matrix_stride, num_outputs, padded, width,
        0 if order is None else matrices, top_k, GROUP=weights.group, ROW_GROUP=ROW_GROUP, GATED=gated, HAS_UP=has_up,
        GATHERS=gathers, ROWS=tile.rows, OUTPUTS=tile.outputs, EXPERTS_PADDED=next_power_of_2(matrices),
        num_warps=tile.num_warps, num_stages=num_stages,
    )  # fmt: skip


def library_matmul(rows: Float8Rows, weights: Float8Weights, out: torch.Tensor) -> None:
    """out [num_rows, rows of the weights]: of one matrix, with a scale for 128 inputs on both sides. Rows come in fours
    (`LIBRARY_ROWS`)."""
    (numbers,), (scales,) = weights.data, weights.scales
    own, theirs = rows.data.view(E4M3), numbers.view(E4M3)
    if out.is_cuda:  # fast sums would be kept in fewer bits than float32 has
        torch._scaled_mm(own, theirs.t(), rows.scales.t(), scales, out_dtype=out.dtype, use_fast_accum=False, out=out)
        return
    left, right = (
        (part.float().unflatten(1, (-1, ROW_GROUP)) * by.t()[..., None]).flatten(1)
        for part, by in ((own, rows.scales), (theirs, scales))
    )
    out.copy_(left @ right.t())
