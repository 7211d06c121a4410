"""Tokens outside a row's grammar are masked: a bit a token, in words of 32. Works on the edited copy of the scores, for
the entries of a batch that have a mask and no others."""

# Kernels are Triton: arguments have no types, and constants are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.sampling_state import NEGATIVE_INFINITY
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import cdiv


@triton.jit
def _mask(edited, entries, words, vocab, num_words, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_and_start_next(PDL)
    number = tl.program_id(1)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    bits = tl.load(words + number.to(tl.int64) * num_words + (ids >> 5), mask=inside, other=0)
    target = edited + tl.load(entries + number).to(tl.int64) * vocab + ids
    scores = tl.load(target, mask=inside, other=0.0)
    is_allowed = ((bits >> (ids & 31)) & 1) == 1
    # What is not a number stays so: the row must be seen to be broken.
    tl.store(target, tl.where(is_allowed | (scores != scores), scores, NEGATIVE_INFINITY), mask=inside)


def mask(edited: torch.Tensor, entries: torch.Tensor, words: torch.Tensor, *, block: int) -> None:
    """Set scores to -inf whose bit is 0: edited float32 [batch, vocab], entries int32 [masked] of the batch,
    words int32 [masked, ceil(vocab / 32)], the lowest bit first."""
    vocab = edited.shape[1]
    dependent(_mask, (cdiv(vocab, block), len(entries)), edited.device)(
        edited, entries, words, vocab, words.shape[1], BLOCK=block, num_warps=8
    )
