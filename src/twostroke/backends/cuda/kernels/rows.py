"""Writing single entries of the block tables."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels.whole_numbers import cdiv

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _write_entries_kernel(table, indices, values, count, BLOCK: tl.constexpr):
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entries < count
    index = tl.load(indices + entries, mask=is_entry, other=0)
    value = tl.load(values + entries, mask=is_entry, other=0)
    tl.store(table + index, value, mask=is_entry)


def write_entries(table: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """table.view(-1)[indices] = values, all int32."""
    count = len(indices)
    launcher(_write_entries_kernel, (cdiv(count, BLOCK),))(table, indices, values, count, BLOCK=BLOCK)
