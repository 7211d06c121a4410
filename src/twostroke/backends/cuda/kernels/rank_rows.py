"""What a rank of several does by itself with what is everybody's: rows take the tokens that rank 0 sampled, and of the
experts that tokens are sent to those count that this rank holds."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.compile_ahead import launcher
from twostroke.backends.cuda.kernels import sampling_state as state

PAIRS = 256
"""To a program."""


@triton.jit
def _take_tokens(rows, tokens, records, last_tokens, padding_row):
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    token = tl.load(tokens + entry)
    if (token >= 0) & (row != padding_row):
        record = records + row.to(tl.int64) * state.NUM_WORDS
        tl.store(last_tokens + row, token)
        tl.store(record + state.NUM_OUTPUT, tl.load(record + state.NUM_OUTPUT) + 1)


@triton.jit
def _keep_held(chosen, shares, first, num_held, num_pairs, PAIRS: tl.constexpr):
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pairs < num_pairs
    place = tl.load(chosen + pairs, mask=is_pair, other=0) - first
    is_held = (place >= 0) & (place < num_held)
    share = tl.load(shares + pairs, mask=is_pair, other=0.0)
    tl.store(chosen + pairs, tl.where(is_held, place, 0), mask=is_pair)
    tl.store(shares + pairs, tl.where(is_held, share, 0.0), mask=is_pair)


def take_tokens(
    rows: torch.Tensor,  # int32 [batch]
    tokens: torch.Tensor,  # int32 [batch]; negative: none
    records: torch.Tensor,  # int64 [max rows + 1, words]
    last_tokens: torch.Tensor,  # int32 [max rows + 1]
) -> None:
    """Advance each row by its token, as sampling it would have."""
    launcher(_take_tokens, (len(rows),))(rows, tokens, records, last_tokens, len(records) - 1)


def keep_held(chosen: torch.Tensor, shares: torch.Tensor, first: int, num_held: int) -> None:
    """chosen int32 and shares float32, of pairs of a token and an expert, contiguous: experts are counted among those
    held, and of others the share is nothing; they are the first then, whose result is dropped."""
    num_pairs = chosen.numel()
    launcher(_keep_held, (triton.cdiv(num_pairs, PAIRS),))(chosen, shares, first, num_held, num_pairs, PAIRS=PAIRS)
