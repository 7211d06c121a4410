"""Norms of whole rows, alone or fused with the residual stream: RMS norms, and those of encoders. Weights are what the
row is multiplied by: where a family stores them less one, whoever loads them adds it. Mathematics in float32; the
residual stays in its own type."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2


def rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden]
    weight: torch.Tensor,  # [hidden]
    out: torch.Tensor,  # [num_tokens, hidden]; may be x
    *,
    eps: float,
    gain: float = 1.0,
) -> None:
    """out = norm(x) * weight * gain."""
    add_rms_norm(x, None, weight, out, eps=eps, gain=gain)


def add_rms_norm(
    x: torch.Tensor,  # [num_tokens, hidden], or [parts, num_tokens, hidden]: a product cut along its depth
    residual: torch.Tensor | None,  # [num_tokens, hidden], updated
    weight: torch.Tensor | None,  # [hidden]
    out: torch.Tensor | None,  # [num_tokens, hidden]; may be x
    *,
    eps: float,
    post_weight: torch.Tensor | None = None,  # [hidden]
    scale: torch.Tensor | None = None,  # float32 [1]
    gain: float = 1.0,
) -> None:
    """residual += x, the sum of its parts; out = norm(residual) * weight * gain. Without a weight and an out only the
    first half is done. With a `post_weight` norm(x) * post_weight joins the residual in place of x. `scale`: what the
    residual is then multiplied by."""
    assert (weight is None) == (out is None)
    num_tokens, hidden = x.shape[-2:]
    if num_tokens == 0:
        return
    block = next_power_of_2(hidden)
    dependent(_norm, (num_tokens,), x.device)(
        x, post_weight, residual, scale, weight, out, eps, gain, x.stride(-2), x.stride(0),
        0 if residual is None else residual.stride(0), 0 if out is None else out.stride(0),
        HIDDEN=hidden, PARTS=x.shape[0] if x.dim() == 3 else 1, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


def norm_spans(
    qkv: torch.Tensor,  # [num_tokens, all heads of queries, of keys, and what is behind them], changed
    q_norm: torch.Tensor,  # [heads * head_dim]
    k_norm: torch.Tensor,  # [kv_heads * head_dim]
    *,
    eps: float,
) -> None:
    """Queries of a token are normed all together, and so are its keys."""
    if len(qkv) == 0:
        return
    widths = (len(q_norm), len(k_norm))
    block = next_power_of_2(max(widths))
    dependent(_norm_spans, (len(qkv), 2), qkv.device)(
        qkv, q_norm, k_norm, eps, qkv.stride(0), QUERIES=widths[0], KEYS=widths[1], BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


def layer_norm(
    rows: torch.Tensor,  # [num_tokens, hidden], changed; contiguous
    weight: torch.Tensor,  # [hidden]
    bias: torch.Tensor,  # [hidden]
    *,
    eps: float,
) -> None:
    """rows = (rows - mean) / deviation * weight + bias"""
    num_tokens, hidden = rows.shape
    if num_tokens == 0:
        return
    block = next_power_of_2(hidden)
    dependent(_layer_norm, (num_tokens,), rows.device)(
        rows, weight, bias, eps, HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
    )


@triton.jit
def centred(row, mask, weight, bias, eps, HIDDEN: tl.constexpr):
    """A layer norm of one row in float32, zero where it is masked; weight and bias of it, too."""
    mean = tl.sum(row, 0) / HIDDEN
    apart = tl.where(mask, row - mean, 0.0)
    return apart * tl.rsqrt(tl.sum(apart * apart, 0) / HIDDEN + eps) * weight + bias


@triton.jit
def _layer_norm(rows, weight, bias, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    own = rows + tl.program_id(0).to(tl.int64) * HIDDEN + columns
    row = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    y = centred(row, mask, scale, shift, eps, HIDDEN)
    tl.store(own, y.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _normalised(row, eps, HIDDEN: tl.constexpr):
    return row * tl.rsqrt(tl.sum(row * row, 0) / HIDDEN + eps)


@triton.jit
def _norm(
    x, post_weight, residual, stream_scale, weight, out, eps, gain, x_stride, part_stride, residual_stride, out_stride,
    HIDDEN: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    # Weights never change, so they may be on their way before the kernel ahead has ended.
    if weight is not None:
        scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if post_weight is not None:
        post_scale = tl.load(post_weight + columns, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    row = tl.load(x + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        row += tl.load(x + part * part_stride + token * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if post_weight is not None:
        row = _normalised(row, eps, HIDDEN) * post_scale
    if residual is not None:
        residual_row = residual + token * residual_stride + columns
        row += tl.load(residual_row, mask=mask, other=0.0).to(tl.float32)
        if stream_scale is not None:
            row *= tl.load(stream_scale)
        rounded = row.to(residual.dtype.element_ty)
        tl.store(residual_row, rounded, mask=mask)
        # The norm is of what later layers will read.
        row = rounded.to(tl.float32)
    if weight is not None:
        y = _normalised(row, eps, HIDDEN) * scale * gain
        tl.store(out + token * out_stride + columns, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _norm_spans(
    qkv, q_norm, k_norm, eps, stride, QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    is_keys = tl.program_id(1) == 1
    width = tl.where(is_keys, KEYS, QUERIES)
    mask = columns < width
    q_scale = tl.load(q_norm + columns, mask=mask & (not is_keys), other=0.0).to(tl.float32)
    k_scale = tl.load(k_norm + columns, mask=mask & is_keys, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    own = qkv + tl.program_id(0).to(tl.int64) * stride + tl.where(is_keys, QUERIES, 0) + columns
    row = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    y = row * tl.rsqrt(tl.sum(row * row, 0) / width + eps) * (q_scale + k_scale)
    tl.store(own, y.to(qkv.dtype.element_ty), mask=mask)
