"""Scores that differ from the logits: a row's bias, then repetition, presence and frequency penalties, then its stop
ids masked below min_tokens, then what its grammar does not allow. Written to a copy, since logprobs are of the logits
as they were; a row without edits is not copied. Knows one block of one row at a time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.sampling_state import SampledBatch
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import cdiv


@triton.jit
def _penalise(scores, counts, record):
    """In float64, rounded once to float32 and kept finite, as the host does. One division for a whole block: a last
    digit of float64 is lost, which float32 does not show."""
    repetition = state.float_word(record, state.REPETITION)
    inverse = 1.0 / repetition
    presence = state.float_word(record, state.PRESENCE)
    frequency = state.float_word(record, state.FREQUENCY)
    values = scores.to(tl.float64)
    values = values * tl.where(values > 0, inverse, repetition)
    times = (counts >> 1).to(tl.float64)
    values -= tl.where(times > 0, presence, 0.0) + frequency * times
    return tl.minimum(tl.maximum(values, -state.FLOAT32_MAX), state.FLOAT32_MAX).to(tl.float32)


@triton.jit
def _with_drafts(counts, ids, drafted, entry, WIDTH: tl.constexpr):
    """What a row will have written if the drafts ahead of one of its entries hold."""
    number = entry % WIDTH
    for ahead in tl.static_range(1, WIDTH):
        token = tl.load(drafted + entry - number + ahead, mask=ahead <= number, other=-1)
        counts += tl.where(ids == token, 2, 0)
    return counts


@triton.jit
def _edit(batch, stride, vocab, BLOCK: tl.constexpr, LIST_PART: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    wait_and_start_next(PDL)
    first = tl.program_id(0) * BLOCK
    entry = tl.program_id(1)
    record = state.record_of(batch, entry)
    if state.is_edited(record):
        ids = first + tl.arange(0, BLOCK)
        inside = ids < vocab
        scores = tl.load(batch.logits + entry.to(tl.int64) * stride + ids, mask=inside, other=0.0)
        # What is not finite stays so whatever is done to it; then -inf can only be a mask.
        scores = tl.where(tl.abs(scores) < float("inf"), scores, float("nan"))
        is_sound = scores == scores
        target = batch.edited + entry.to(tl.int64) * vocab
        lists = tl.load(record + state.LISTS).to(tl.pointer_type(tl.int32))
        num_biases = tl.load(record + state.NUM_BIASES).to(tl.int32)
        if num_biases > 0:
            tl.store(target + ids, scores, mask=inside)
            tl.debug_barrier()  # the block's scores are there before single ones are changed
            start = 0
            while start < num_biases:
                places = start + tl.arange(0, LIST_PART)
                biased = tl.load(lists + places, mask=places < num_biases, other=-1)
                is_here = (biased >= first) & (biased < first + BLOCK)
                bias = tl.load(lists + num_biases + places, mask=is_here, other=0).to(tl.float32, bitcast=True)
                tl.store(target + biased, tl.load(target + biased, mask=is_here) + bias, mask=is_here)
                start += LIST_PART
            tl.debug_barrier()
            scores = tl.load(target + ids, mask=inside, other=0.0)
        counts_address = tl.load(record + state.COUNTS)
        if counts_address != 0:
            counts = tl.load(counts_address.to(tl.pointer_type(tl.int32)) + ids, mask=inside, other=0)
            if WIDTH > 1:
                counts = _with_drafts(counts, ids, batch.drafted, entry, WIDTH)
            scores = tl.where((counts > 0) & is_sound, _penalise(scores, counts, record), scores)
        tl.store(target + ids, scores, mask=inside)
        if tl.load(record + state.NUM_OUTPUT) < tl.load(record + state.MIN_TOKENS):
            tl.debug_barrier()
            num_stops = tl.load(record + state.NUM_STOPS).to(tl.int32)
            start = 0
            while start < num_stops:
                places = start + tl.arange(0, LIST_PART)
                stops = tl.load(lists + 2 * num_biases + places, mask=places < num_stops, other=-1)
                is_here = (stops >= first) & (stops < first + BLOCK)
                values = tl.load(target + stops, mask=is_here, other=0.0)
                tl.store(target + stops, tl.where(values == values, state.NEGATIVE_INFINITY, values), mask=is_here)
                start += LIST_PART


def edit(batch: SampledBatch, *, block: int, width: int = 1) -> None:
    """Write the scores of the rows that have edits to `batch.edited`. `width`: entries of a row, if it has several."""
    logits = batch.logits
    dependent(_edit, (cdiv(logits.shape[1], block), len(logits)), logits.device)(
        batch, logits.stride(0), logits.shape[1], BLOCK=block, LIST_PART=256, WIDTH=width, num_warps=8
    )


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
    tl.store(target, tl.where(is_allowed | (scores != scores), scores, state.NEGATIVE_INFINITY), mask=inside)


def mask(edited: torch.Tensor, entries: torch.Tensor, words: torch.Tensor, *, block: int) -> None:
    """Set scores to -inf whose bit is 0: edited float32 [batch, vocab], entries int32 [masked] of the batch,
    words int32 [masked, ceil(vocab / 32)], the lowest bit first."""
    vocab = edited.shape[1]
    dependent(_mask, (cdiv(vocab, block), len(entries)), edited.device)(
        edited, entries, words, vocab, words.shape[1], BLOCK=block, num_warps=8
    )
