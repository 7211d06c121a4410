# ruff: noqa: N803  (constant parameters of kernels are written in capitals)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""How heads are normed and turned, in float32: one mathematics for the pass that stands before attention (`rope.py`)
and for decode attention that takes heads as the product left them. Knows no cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """What a layer does to its queries and keys before they meet."""

    cos_sin: torch.Tensor
    """float32 [max_context, rope_dim]: cosines of the pairs, then sines. Dimension i is paired with i + rope_dim / 2;
    those from rope_dim on are not turned."""
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    eps: float = 0.0


@triton.jit
def turn(x, partner, cos, sin):
    """A dimension by its partner, whose sine is negative for the first of a pair. Said as one operation with one
    rounding, so that every kernel rounds alike."""
    return tl.fma(x, cos, partner * sin)


@triton.jit
def norm_scale(squares, eps, HEAD_DIM: tl.constexpr):
    """Of heads by the sums of their squares."""
    return tl.rsqrt(squares / HEAD_DIM + eps)


@triton.jit
def _in_runs(index, HALF: tl.constexpr):
    """Indices that go on by one within what a wide load takes, which the compiler cannot tell by itself."""
    RUN: tl.constexpr = 8 if HALF % 8 == 0 else HALF & -HALF  # noqa: N806
    return tl.max_contiguous(tl.multiple_of(index, [1, RUN]), [1, RUN])


@triton.jit
def load_angles(cos_sin, position, dim, HALF: tl.constexpr):
    """Of every dimension [1, dims]: the cosine, and the sine with its sign."""
    angles = cos_sin + position.to(tl.int64) * (2 * HALF) + _in_runs(tl.where(dim < HALF, dim, dim - HALF), HALF)
    is_turned = dim < 2 * HALF
    cos = tl.load(angles, mask=is_turned, other=1.0)
    sin = tl.load(angles + HALF, mask=is_turned, other=0.0)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def load_turned(heads, dim, held, norm, eps, cos, sin, HALF: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Heads at their pointers [heads, 1], normed unless `norm` is None, and turned: float32 [heads, dims]."""
    is_turned = dim < 2 * HALF
    partner_dim = _in_runs(tl.where(dim < HALF, dim + HALF, dim - HALF), HALF)
    x = tl.load(heads + dim, mask=held, other=0.0).to(tl.float32)
    partner = tl.load(heads + partner_dim, mask=held & is_turned, other=0.0).to(tl.float32)
    if norm is not None:
        scale = norm_scale(tl.sum(x * x, 1), eps, HEAD_DIM)[:, None]
        x *= scale * tl.load(norm + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
        partner *= scale * tl.load(norm + partner_dim, mask=is_turned, other=0.0).to(tl.float32)
    return tl.where(is_turned, turn(x, partner, cos, sin), x)
