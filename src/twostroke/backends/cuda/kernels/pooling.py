"""What is made of a text's last states, all of them or one. Always added in the same order, whoever is read beside the
text."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv
from twostroke.models.pooling import States

_COLUMNS: Final = 32
_TOKENS: Final = 64
"""At a time."""


def pool_states(
    kind: States,
    states: torch.Tensor,  # float32 [num_tokens, hidden]
    firsts: torch.Tensor,  # int32 [texts]: a text's first token
    counts: torch.Tensor,  # int32 [texts]: how many it has
    out: torch.Tensor,  # float32 [texts, hidden]
) -> None:
    texts, hidden = out.shape
    if texts == 0:
        return
    dependent(_pool_states, (texts, cdiv(hidden, _COLUMNS)), out.device)(
        states, firsts, counts, out, states.stride(0), out.stride(0), HIDDEN=hidden, COLUMNS=_COLUMNS, TOKENS=_TOKENS,
        FIRST=kind == "first", LAST=kind == "last", MAX=kind == "max", ROOT=kind == "root_mean",
        WEIGHTED=kind == "weighted_mean", num_warps=4,
    )  # fmt: skip


@triton.jit
def _pool_states(
    states, firsts, counts, out, stride, out_stride, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MAX: tl.constexpr, ROOT: tl.constexpr,
    WEIGHTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    text = tl.program_id(0)
    first, count = tl.load(firsts + text), tl.load(counts + text)
    if LAST:
        first = first + count - 1
    if FIRST or LAST:
        count = count * 0 + 1
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    pooled = tl.zeros([COLUMNS], tl.float32)
    if MAX:
        pooled += float("-inf")
    start = 0
    while start < count:  # not a range: the interpreter makes none of a run-time number
        token = start + tl.arange(0, TOKENS)
        rows = states + (first + token).to(tl.int64)[:, None] * stride + columns[None, :]
        is_state = (token < count)[:, None] & is_column[None, :]
        if MAX:
            pooled = tl.maximum(pooled, tl.max(tl.load(rows, mask=is_state, other=float("-inf")), 0))
        elif WEIGHTED:
            weights = (token + 1).to(tl.float32)[:, None]
            pooled += tl.sum(tl.load(rows, mask=is_state, other=0.0) * weights, 0)
        else:
            pooled += tl.sum(tl.load(rows, mask=is_state, other=0.0), 0)
        start += TOKENS
    length = count.to(tl.float32)
    if ROOT:
        pooled = pooled / tl.sqrt(length)
    elif WEIGHTED:
        pooled = pooled / (length * (length + 1.0) * 0.5)
    elif not MAX:
        pooled = pooled / length
    tl.store(out + text.to(tl.int64) * out_stride + columns, pooled, mask=is_column)
