"""The mean of a text's last states. Always added in the same order, whoever is read beside the text."""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import cdiv

_COLUMNS: Final = 32
_TOKENS: Final = 64
"""At a time."""


def mean_states(
    states: torch.Tensor,  # float32 [num_tokens, hidden]
    firsts: torch.Tensor,  # int32 [texts]: a text's first token
    counts: torch.Tensor,  # int32 [texts]: how many it has
    out: torch.Tensor,  # float32 [texts, hidden]
) -> None:
    texts, hidden = out.shape
    if texts == 0:
        return
    dependent(_mean_states, (texts, cdiv(hidden, _COLUMNS)), out.device)(
        states, firsts, counts, out, states.stride(0), out.stride(0), HIDDEN=hidden, COLUMNS=_COLUMNS, TOKENS=_TOKENS,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _mean_states(
    states, firsts, counts, out, stride, out_stride, HIDDEN: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next_and_wait(PDL)
    text = tl.program_id(0)
    first, count = tl.load(firsts + text), tl.load(counts + text)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < HIDDEN
    sums = tl.zeros([COLUMNS], tl.float32)
    start = 0
    while start < count:  # not a range: the interpreter makes none of a run-time number
        token = start + tl.arange(0, TOKENS)
        rows = states + (first + token).to(tl.int64)[:, None] * stride + columns[None, :]
        sums += tl.sum(tl.load(rows, mask=(token < count)[:, None] & is_column[None, :], other=0.0), 0)
        start += TOKENS
    tl.store(out + text.to(tl.int64) * out_stride + columns, sums / count, mask=is_column)
