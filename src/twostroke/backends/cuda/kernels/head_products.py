"""Products in which each head has a matrix of its own: what brings queries into the latents' space, and latents that
were weighed into that of values. Knows heads and strides; what is multiplied, others know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.attention_table import settings_for
from twostroke.backends.cuda.kernels.moe_routing import dot, dot_precision
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True)
class HeadTile:
    """What a program takes of one head: `tokens` by `outputs`, `depth` inputs at a time."""

    tokens: int
    outputs: int
    depth: int
    warps: int
    stages: int


@cache
def head_tile(num_tokens: int) -> HeadTile:
    return HeadTile(**settings_for("head products", tokens=num_tokens))


def multiply_heads(
    x: torch.Tensor,  # [num_tokens, heads, inputs], any strides but that inputs are contiguous
    weights: torch.Tensor,  # [heads, inputs, outputs], one of the last two contiguous
    out: torch.Tensor,  # [num_tokens, heads, outputs], any strides but that outputs are contiguous
    *,
    tile: HeadTile | None = None,
) -> None:
    """out[t, h] = x[t, h] @ weights[h]"""
    (num_tokens, heads, num_inputs), num_outputs = x.shape, out.shape[2]
    if num_tokens == 0:
        return
    assert x.stride(2) == out.stride(2) == 1 and 1 in (weights.stride(1), weights.stride(2))
    tile = tile or head_tile(num_tokens)
    outputs = min(tile.outputs, max(16, next_power_of_2(num_outputs)))
    grid = (cdiv(num_tokens, tile.tokens), cdiv(num_outputs, outputs), heads)
    dependent(_head_kernel, grid, x.device)(
        x, weights, out, num_tokens, x.stride(0), out.stride(0), x.stride(1), out.stride(1), weights.stride(0),
        num_inputs, num_outputs, INPUTS_LAST=weights.stride(1) == 1,
        ROW=weights.stride(2) if weights.stride(1) == 1 else weights.stride(1), TOKENS=tile.tokens, OUTPUTS=outputs,
        DEPTH=min(tile.depth, max(16, next_power_of_2(num_inputs))), PRECISION=dot_precision(x.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _head_kernel(
    x, weights, out, num_tokens, x_stride, out_stride, x_head: tl.constexpr, out_head: tl.constexpr,
    weight_head: tl.constexpr, num_inputs: tl.constexpr, num_outputs: tl.constexpr, INPUTS_LAST: tl.constexpr,
    ROW: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """INPUTS_LAST: a head's matrix lies as [outputs, inputs]; ROW: from one of its rows to the next."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    head = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    start_next_and_wait(PDL)
    is_token, is_output = tokens < num_tokens, outputs < num_outputs
    own = x + tl.where(is_token, tokens, 0).to(tl.int64)[:, None] * x_stride + head * x_head + depth[None, :]
    matrix = weights + head.to(tl.int64) * weight_head
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, DEPTH):
        is_input = start + depth < num_inputs
        rows = tl.load(own + start, mask=is_input[None, :], other=0.0)
        if INPUTS_LAST:
            mask = is_output[:, None] & is_input[None, :]
            block = tl.trans(tl.load(matrix + outputs[:, None] * ROW + start + depth[None, :], mask=mask, other=0.0))
        else:
            mask = is_input[:, None] & is_output[None, :]
            block = tl.load(matrix + (start + depth)[:, None] * ROW + outputs[None, :], mask=mask, other=0.0)
        sums = dot(rows, block, sums, PRECISION)
    target = out + tokens.to(tl.int64)[:, None] * out_stride + head * out_head + outputs[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])
