"""The vectors that layers get for each token beside the residual stream: half of each made from the token's embedding,
half looked up by the token. All layers' at once, in place; mathematics in float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

HALF = tl.constexpr(2**-0.5)
"""Of the sum: two vectors of about one size are as large as one."""


def make_inputs(
    projected: torch.Tensor,  # [num_tokens, layers * width], changed
    norm: torch.Tensor,  # [width]
    embedding: torch.Tensor,  # [vocabulary, layers * width]
    token_ids: torch.Tensor,  # int32 [num_tokens], or FROM_ROW
    rows: torch.Tensor,  # int32 [num_tokens]
    last_tokens: torch.Tensor,  # int32 [num_rows]
    *,
    gain: float,
    eps: float,
) -> None:
    """projected = (norm(projected * gain) of each layer + what is looked up * sqrt(width)) / sqrt(2). Ids are as those
    of `embedding.gather`."""
    num_tokens, width = len(projected), len(norm)
    if num_tokens == 0:
        return
    dependent(_make_inputs, (num_tokens, projected.shape[1] // width), projected.device)(
        projected, norm, embedding, token_ids, rows, last_tokens, gain, eps, width**0.5, projected.stride(0),
        embedding.stride(0), WIDTH=width, BLOCK=next_power_of_2(width), num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["token_ids", "rows"])
def _make_inputs(
    projected, norm, embedding, token_ids, rows, last_tokens, gain, eps, lookup_gain, stride, embedding_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    weight = tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
    start_next_and_wait(PDL)
    token_id = tl.load(token_ids + token)
    if token_id < 0:
        token_id = tl.load(last_tokens + tl.load(rows + token)).to(tl.int32)
    within = tl.program_id(1) * WIDTH + columns
    own = projected + token.to(tl.int64) * stride + within
    row = tl.load(own, mask=mask, other=0.0).to(tl.float32) * gain
    made = row * tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps) * weight
    looked_up = tl.load(embedding + token_id.to(tl.int64) * embedding_stride + within, mask=mask, other=0.0)
    made = (made + looked_up.to(tl.float32) * lookup_gain) * HALF
    tl.store(own, made.to(projected.dtype.element_ty), mask=mask)
