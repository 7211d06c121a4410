"""A mixture of experts for many tokens: matrix products of rows sorted by expert (see `moe_routing.py`), each tile of
rows with its own expert's weights, and the sum of every token's experts. The grid is the most tiles there can be;
programs beyond those there are end at once, so nothing waits for the host."""

# ruff: noqa: N803, SIM108  (compile-time constants are in capitals; Triton wants its branches in full)
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.moe_decode import gated
from twostroke.backends.cuda.kernels.moe_routing import dot, dot_precision, launch_options

_COMBINE_OUTPUTS = 1024


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


def choose_tile(num_rows: int, num_experts: int, *, gated: bool) -> GroupedTile:
    """By how many rows an expert gets on average, as `bench/cuda/moe.py` found best on an H200."""
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
def _grouped_kernel(
    inputs, weights, results, sorted_pairs, starts, tile_ends, num_outputs: tl.constexpr, num_inputs: tl.constexpr,
    experts: tl.constexpr, top_k: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS_PADDED: tl.constexpr, WEIGHTS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: rows are gathered from the tokens, and gate and up become one result. Else rows are sorted already."""
    tile = tl.program_id(1)
    ids = tl.arange(0, EXPERTS_PADDED)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ends = tl.load(tile_ends + ids, mask=ids < experts, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert >= experts:
        return
    first_tile = tl.load(tile_ends + expert - 1, mask=expert > 0, other=0)
    rows = tl.load(starts + expert) + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    is_row = rows < tl.load(starts + expert + 1)
    if GATED:
        sources = tl.load(sorted_pairs + rows, mask=is_row, other=0) // top_k
    else:
        sources = tl.where(is_row, rows, 0)
    # Rows and outputs beyond the end read the first one again: no mask in the loop, and they are not stored.
    readable = tl.where(outputs < num_outputs, outputs, 0)
    depth = tl.arange(0, DEPTH)
    input_rows = inputs + sources[:, None].to(tl.int64) * num_inputs + depth[None, :]
    matrix_rows: tl.constexpr = 2 * num_outputs if GATED else num_outputs
    expert_weights = weights + expert.to(tl.int64) * (matrix_rows * num_inputs)
    weight_rows = expert_weights + readable[:, None] * num_inputs + depth[None, :]
    up_rows = weight_rows + num_outputs * num_inputs
    if WEIGHTS_FIRST:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, DEPTH):
        if num_inputs % DEPTH == 0:
            row_block = tl.load(input_rows + start)
            sums = _multiply(row_block, tl.load(weight_rows + start), sums, WEIGHTS_FIRST, PRECISION)
            if GATED:
                up_sums = _multiply(row_block, tl.load(up_rows + start), up_sums, WEIGHTS_FIRST, PRECISION)
        else:
            mask = (start + depth < num_inputs)[None, :]
            row_block = tl.load(input_rows + start, mask=mask, other=0.0)
            block = tl.load(weight_rows + start, mask=mask, other=0.0)
            sums = _multiply(row_block, block, sums, WEIGHTS_FIRST, PRECISION)
            if GATED:
                block = tl.load(up_rows + start, mask=mask, other=0.0)
                up_sums = _multiply(row_block, block, up_sums, WEIGHTS_FIRST, PRECISION)
    if GATED:
        sums = gated(sums, up_sums, GELU)
    if WEIGHTS_FIRST:
        sums = tl.trans(sums)
    targets = results + rows[:, None].to(tl.int64) * num_outputs + outputs[None, :]
    mask = is_row[:, None] & (outputs < num_outputs)[None, :]
    tl.store(targets, sums.to(results.dtype.element_ty), mask=mask)


@triton.jit
def _combine_kernel(
    expert_outputs, rows, shares, residual, out, hidden: tl.constexpr, top_k: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = outputs < hidden
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([OUTPUTS], tl.float32)
    for slot in tl.static_range(top_k):
        row = tl.load(rows + token * top_k + slot).to(tl.int64)
        values = tl.load(expert_outputs + row * hidden + outputs, mask=mask, other=0.0)
        sums += tl.load(shares + token * top_k + slot) * values.to(tl.float32)
    target = token.to(tl.int64) * hidden + outputs
    if HAS_RESIDUAL:
        sums += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target, sums.to(out.dtype.element_ty), mask=mask)


def grouped_matmul(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    results: torch.Tensor,
    sorted_pairs: torch.Tensor,
    starts: torch.Tensor,
    tile_ends: torch.Tensor,
    *,
    top_k: int,
    gated: bool,
    tile: GroupedTile,
    gelu: bool = False,
    pdl: bool = False,
) -> None:
    """Gated: inputs [num_tokens, hidden], weights [experts, 2 * intermediate, hidden] (gate, then up) -> results
    [num_pairs, intermediate], sorted. Else: inputs [num_pairs, intermediate], sorted, weights
    [experts, hidden, intermediate] -> results [num_pairs, hidden], sorted. `tile_ends` must be for `tile.rows`."""
    experts, matrix_rows, num_inputs = weights.shape
    num_outputs = matrix_rows // 2 if gated else matrix_rows
    num_tiles = most_tiles(sorted_pairs.shape[0], experts, tile.rows)
    _grouped_kernel[(triton.cdiv(num_outputs, tile.outputs), num_tiles)](
        inputs, weights, results, sorted_pairs, starts, tile_ends, num_outputs, num_inputs, experts, top_k,
        GATED=gated, GELU=gelu, ROWS=tile.rows, OUTPUTS=tile.outputs,
        DEPTH=min(tile.depth, max(16, triton.next_power_of_2(num_inputs))),
        EXPERTS_PADDED=triton.next_power_of_2(experts), WEIGHTS_FIRST=tile.weights_first,
        PRECISION=dot_precision(inputs.dtype), PDL=pdl, num_warps=tile.num_warps, num_stages=tile.num_stages,
        **launch_options(pdl),
    )  # fmt: skip


def combine(
    expert_outputs: torch.Tensor,
    rows: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """expert_outputs [num_pairs, hidden], sorted; rows int32 and shares float32, both [num_tokens, top_k] -> out
    [num_tokens, hidden], on top of `residual` if there is one (`out` itself, perhaps)."""
    num_tokens, top_k = rows.shape
    hidden = out.shape[1]
    block = min(_COMBINE_OUTPUTS, triton.next_power_of_2(hidden))
    _combine_kernel[(triton.cdiv(hidden, block), num_tokens)](
        expert_outputs, rows, shares, out if residual is None else residual, out, hidden, top_k,
        HAS_RESIDUAL=residual is not None, OUTPUTS=block, PDL=pdl, num_warps=4, **launch_options(pdl),
    )  # fmt: skip
