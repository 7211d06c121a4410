"""What heads read that look at the model's last hidden state alone: the state behind which each row's last token was
drawn, normed. `head_states.keep_states` keeps them. Knows rows and positions; nothing of steps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.head_states import KEPT
from twostroke.backends.cuda.kernels.norms import _normalised
from twostroke.backends.cuda.kernels.sampling_state import NUM_WORDS, last_position
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

_KEPT = tl.constexpr(KEPT)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _read_last(
    kept, records, rows, norm, out, eps, rows_stride, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    start_next_and_wait(PDL)
    stream = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    row = tl.load(rows + stream * rows_stride).to(tl.int64)
    position = last_position(records + row * NUM_WORDS)  # of a token that no pass has read yet
    source = kept + (row * _KEPT + (position + _KEPT - 1) % _KEPT) * HIDDEN
    state = _normalised(tl.load(source + columns, mask=mask, other=0.0).to(tl.float32), eps, HIDDEN)
    state *= tl.load(norm + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + stream.to(tl.int64) * HIDDEN + columns, state.to(out.dtype.element_ty), mask=mask)


def read_last(
    kept: torch.Tensor,  # [max rows + 1, KEPT, hidden]
    records: torch.Tensor,  # int64 [max rows + 1, words]
    rows: torch.Tensor,  # int32 [num_streams], any distance apart
    norm: torch.Tensor,  # [hidden]
    out: torch.Tensor,  # [num_streams, hidden], written
    *,
    eps: float,
) -> None:
    """Of each row, the state of the token before its last."""
    num_streams, hidden = out.shape
    block = next_power_of_2(hidden)
    dependent(_read_last, (num_streams,), out.device)(
        kept, records, rows, norm, out, eps, rows.stride(0), HIDDEN=hidden, BLOCK=block,
        num_warps=min(max(block // 512, 1), 8),
    )  # fmt: skip
