"""The sum of every token's experts, with the residual stream and the norm that follow it. Knows no expert's weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2


@dataclass(frozen=True, slots=True, eq=False)
class NextNorm:
    """The norm of whatever comes after the mixture, which reads the residual stream just written."""

    weight: torch.Tensor  # [hidden]
    out: torch.Tensor  # [num_tokens, hidden]
    eps: float


@triton.jit
def _combine_kernel(
    expert_outputs, rows, shares, residual, out, norm_weight, normed, eps, hidden: tl.constexpr, top_k: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: a block of a token's outputs; all of them where a norm follows."""
    token = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < hidden
    # Weights never change, so they may be on their way before the kernel ahead has ended.
    if norm_weight is not None:
        scale = tl.load(norm_weight + outputs, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    sums = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(top_k):
        row = tl.load(rows + token * top_k + slot).to(tl.int64)
        values = tl.load(expert_outputs + row * hidden + outputs, mask=mask, other=0.0)
        sums += tl.load(shares + token * top_k + slot) * values.to(tl.float32)
    target = token.to(tl.int64) * hidden + outputs
    if residual is not None:
        sums += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
    rounded = sums.to(out.dtype.element_ty)
    tl.store(out + target, rounded, mask=mask)
    if norm_weight is not None:
        # The norm is of what later layers will read.
        row_values = rounded.to(tl.float32)
        row_values *= tl.rsqrt(tl.sum(row_values * row_values, 0) / hidden + eps)
        tl.store(normed + target, (row_values * scale).to(normed.dtype.element_ty), mask=mask)


def combine(
    expert_outputs: torch.Tensor,
    rows: torch.Tensor,
    shares: torch.Tensor,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    next_norm: NextNorm | None = None,
) -> None:
    """expert_outputs [num_pairs, hidden], sorted; rows int32 and shares float32, both [num_tokens, top_k] -> out
    [num_tokens, hidden], on top of `residual` if there is one (`out` itself, perhaps), and its norm."""
    num_tokens, top_k = rows.shape
    hidden = out.shape[1]
    padded = next_power_of_2(hidden)
    block = padded if next_norm is not None else min(1024, padded)
    dependent(_combine_kernel, (num_tokens, cdiv(hidden, block)), out.device)(
        expert_outputs, rows, shares, residual, out,
        None if next_norm is None else next_norm.weight, None if next_norm is None else next_norm.out,
        0.0 if next_norm is None else next_norm.eps, hidden, top_k, BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
