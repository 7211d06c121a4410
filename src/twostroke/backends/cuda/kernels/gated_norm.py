"""What stands between the states and the last product of a layer that keeps them: a norm over parts of a row, and a
gate, before it or behind it. Mathematics in float32."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv, next_power_of_2

PROGRAM_ELEMENTS: Final = 2048


@triton.jit(do_not_specialize=["first"])
def _gated_norm(
    x, gates, weight, out, count, eps, first, x_stride, gates_stride, out_stride,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, GATE_FIRST: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program takes some parts of a token, [ROWS, COLUMNS] with room to powers of two."""
    token = (tl.program_id(0) + first).to(tl.int64)
    part = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (part < PARTS) & (column < WIDTH)
    place = part * WIDTH + column
    scale = tl.load(weight + (column if SHARED else place), mask=(column < WIDTH) if SHARED else mask, other=0.0)
    start_next_and_wait(PDL)
    if count is not None:
        if token < tl.load(count):
            return
    value = tl.load(x + token * x_stride + place, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gates + token * gates_stride + place, mask=mask, other=0.0).to(tl.float32)
    gate *= tl.sigmoid(gate)
    if GATE_FIRST:
        value *= gate
    value *= tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None] * scale
    if not GATE_FIRST:
        value *= gate
    tl.store(out + token * out_stride + place, value.to(out.dtype.element_ty), mask=mask)


def gated_norm(
    x: torch.Tensor,  # [num_tokens, parts * width]
    gates: torch.Tensor,  # [num_tokens, parts * width], any token stride
    weight: torch.Tensor,  # float32 [width], for every part, or [parts * width]
    out: torch.Tensor,  # [num_tokens, parts * width]; may be x
    *,
    parts: int,
    eps: float,
    gate_first: bool,
    first: int = 0,
    count: torch.Tensor | None = None,  # int32 [1]
) -> None:
    """out = norm(x) * weight * silu(gate), or norm(x * silu(gate)) * weight, of tokens from `first` on, or from where
    `count` says on."""
    assert len(x) == len(gates) == len(out)
    num_tokens, width = len(x) - first, x.shape[1] // parts
    if num_tokens == 0:
        return
    columns = next_power_of_2(width)
    rows = min(max(PROGRAM_ELEMENTS // columns, 1), next_power_of_2(parts))
    dependent(_gated_norm, (num_tokens, cdiv(parts, rows)), x.device)(
        x, gates, weight, out, count, eps, first, x.stride(0), gates.stride(0), out.stride(0), PARTS=parts, WIDTH=width,
        GATE_FIRST=gate_first, SHARED=len(weight) == width and parts > 1, ROWS=rows, COLUMNS=columns,
        num_warps=min(max(rows * columns // 512, 1), 16),
    )  # fmt: skip
