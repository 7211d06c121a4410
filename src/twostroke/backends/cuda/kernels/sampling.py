"""One token for each row of a batch: a survey of every (row, block of the vocabulary), then one program a row chooses.
Greedy takes the best score, lowest id first; a draw inverts the cumulative distribution in id order. Which row it is in
the batch, and what else the batch holds, changes nothing: blocks lie at fixed places."""

# Kernels are Triton: arguments have no types, constants are in capitals, and a constant `if` stands alone.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803, SIM102

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.sampling_filters import FilterScratch
from twostroke.backends.cuda.kernels.sampling_search import SearchShape, draw_filtered
from twostroke.backends.cuda.kernels.sampling_state import (
    COUNTS,
    HAS_GRAMMAR,
    MIN_TOKENS,
    NEGATIVE_INFINITY,
    NUM_OUTPUT,
    NUM_WORDS,
    SCALE,
    WEIGHT_ONE,
    source_of,
    uniform,
)
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2


class Summaries(NamedTuple):
    """What the survey finds, [batch, num_blocks] each."""

    best: torch.Tensor
    """float32: the block's best score; NaN where one is not finite."""
    best_id: torch.Tensor
    """int32: the lowest id that has it."""
    total: torch.Tensor
    """float32: the sum of exp((score - best) / temperature)."""

    @classmethod
    def allocate(cls, batch: int, num_blocks: int, device: torch.device) -> Summaries:
        shape = (batch, num_blocks)
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
        )


@triton.jit
def _survey(
    logits,
    edited,
    rows,
    state,
    block_best,
    block_best_id,
    block_total,
    column_best,
    stride,
    vocab,
    num_blocks,
    num_columns,
    BLOCK: tl.constexpr,
    COLUMN: tl.constexpr,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Summarise one block of one row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    entry = tl.program_id(1)
    record = state + tl.load(rows + entry).to(tl.int64) * NUM_WORDS
    ids = block * BLOCK + tl.arange(0, BLOCK)
    source = source_of(logits, edited, record, entry, stride, vocab, EDITS)
    scores = tl.load(source + ids, mask=ids < vocab, other=NEGATIVE_INFINITY)
    best, offset = tl.max(scores, axis=0, return_indices=True)
    is_sound = (tl.abs(scores) < float("inf")) | (ids >= vocab)
    if EDITS:
        # Edited scores hold -inf only where a stop id is masked, or what a grammar does not allow.
        has_mask = tl.load(record + NUM_OUTPUT) < tl.load(record + MIN_TOKENS)
        has_mask = has_mask | (tl.load(record + HAS_GRAMMAR) != 0)
        is_sound = is_sound | (has_mask & (scores == NEGATIVE_INFINITY))
    all_sound = tl.min(is_sound.to(tl.int32), axis=0)
    summary = entry * num_blocks + block
    tl.store(block_best + summary, tl.where(all_sound == 1, best, float("nan")))
    tl.store(block_best_id + summary, block * BLOCK + offset)
    if DRAWS:
        scale = tl.load(record + SCALE).to(tl.float64, bitcast=True).to(tl.float32)
        scale = tl.where(scale > 0.0, scale, 1.0)  # a greedy row's total is read by nobody
        reference = tl.where(best == NEGATIVE_INFINITY, 0.0, best)
        tl.store(block_total + summary, tl.sum(tl.exp2((scores - reference) * scale), axis=0))
    if FILTERS:
        bests = tl.max(tl.reshape(scores, [BLOCK // COLUMN, COLUMN]), axis=1)
        columns = block * (BLOCK // COLUMN) + tl.arange(0, BLOCK // COLUMN)
        tl.store(column_best + entry * num_columns + columns, bests, mask=columns < num_columns)


@triton.jit
def _draw(
    source,
    record,
    best,
    block_bests,
    block_totals,
    vocab,
    BLOCK: tl.constexpr,
):
    """Invert the row's cumulative distribution: find the block by the blocks' totals, then the token inside it."""
    scale = tl.load(record + SCALE).to(tl.float64, bitcast=True)
    shares = tl.exp2((block_bests.to(tl.float64) - best.to(tl.float64)) * scale)
    running = tl.cumsum(block_totals.to(tl.float64) * shares, axis=0)
    total = tl.max(running, axis=0)
    target = uniform(record) * total
    # The last block of any weight, where rounding lets no running total exceed the target.
    block = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), tl.sum((running < total).to(tl.int32), 0))
    places = tl.arange(0, running.shape[0])
    before = tl.max(tl.where(places < block, running, 0.0), axis=0)
    is_block = places == block
    share = tl.sum(tl.where(is_block, shares, 0.0), axis=0)
    block_best = tl.max(tl.where(is_block, block_bests, NEGATIVE_INFINITY), axis=0)

    ids = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(source + ids, mask=ids < vocab, other=NEGATIVE_INFINITY).to(tl.float32)
    weights = tl.exp2((scores.to(tl.float64) - block_best.to(tl.float64)) * scale)
    running_weight = tl.cumsum((weights * WEIGHT_ONE + 0.5).to(tl.int64), axis=0)
    whole = tl.max(running_weight, axis=0)
    inside_target = ((target - before) / share * WEIGHT_ONE).to(tl.int64)
    inside = tl.sum((running_weight <= tl.minimum(inside_target, whole - 1)).to(tl.int32), axis=0)
    return block * BLOCK + inside


@triton.jit
def _choose(
    logits,
    edited,
    rows,
    state,
    block_best,
    block_best_id,
    block_total,
    floors,
    targets,
    marks,
    amounts,
    brackets,
    list_counts,
    list_ids,
    list_scores,
    last_tokens,
    tokens_out,
    stride,
    vocab,
    num_blocks,
    padding_row,
    BLOCK: tl.constexpr,
    SUMMARIES: tl.constexpr,
    LIST: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    FAN: tl.constexpr,
    DRAWS: tl.constexpr,
    FILTERS: tl.constexpr,
    EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose a row's token and advance the row; -1 and nothing advanced where a logit was not finite."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    record = state + row.to(tl.int64) * NUM_WORDS
    places = tl.arange(0, SUMMARIES)
    exists = places < num_blocks
    bests = tl.load(block_best + entry * num_blocks + places, mask=exists, other=NEGATIVE_INFINITY)
    best_ids = tl.load(block_best_id + entry * num_blocks + places, mask=exists, other=vocab)
    is_broken = tl.max((bests != bests).to(tl.int32), axis=0)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == best, best_ids, vocab), axis=0)
    if DRAWS:
        # A row with every token masked has no weight to draw by; it keeps the lowest id.
        if (is_broken == 0) & (best > NEGATIVE_INFINITY) & (tl.load(record + SCALE) != 0):
            totals = tl.load(block_total + entry * num_blocks + places, mask=exists, other=0.0)
            source = source_of(logits, edited, record, entry, stride, vocab, EDITS)
            is_plain = True
            if FILTERS:
                is_plain = tl.load(floors + entry) == float("inf")
                if not is_plain:
                    token = draw_filtered(
                        source,
                        record,
                        entry,
                        best,
                        targets,
                        amounts,
                        brackets,
                        list_counts,
                        list_ids,
                        list_scores,
                        vocab,
                        num_blocks,
                        BLOCK,
                        SUMMARIES,
                        LIST,
                        CHUNK,
                        PART,
                        FAN,
                    )
            if is_plain:
                token = _draw(source, record, best, bests, totals, vocab, BLOCK)
    tl.store(tokens_out + entry, tl.where(is_broken == 1, -1, token))
    if (is_broken == 0) & (row != padding_row):
        tl.store(last_tokens + row, token)
        tl.store(record + NUM_OUTPUT, tl.load(record + NUM_OUTPUT) + 1)
        if EDITS:
            counts_address = tl.load(record + COUNTS)
            if counts_address != 0:
                count = counts_address.to(tl.pointer_type(tl.int32)) + token
                tl.store(count, tl.load(count) + 2)


def survey(
    logits: torch.Tensor,
    edited: torch.Tensor | None,
    rows: torch.Tensor,
    state: torch.Tensor,
    summaries: Summaries,
    filters: FilterScratch | None,
    *,
    draws: bool,
    block: int,
    column: int,
) -> None:
    """Summarise every block of every row, and its columns where some row has filters."""
    batch, vocab = logits.shape
    num_blocks = summaries.best.shape[1]
    dependent(_survey, (num_blocks, batch), logits.device)(
        logits,
        edited,
        rows,
        state,
        *summaries,
        None if filters is None else filters.column_best,
        logits.stride(0),
        vocab,
        num_blocks,
        0 if filters is None else filters.column_best.shape[1],
        BLOCK=block,
        COLUMN=column,
        DRAWS=draws,
        FILTERS=filters is not None,
        EDITS=edited is not None,
        num_warps=4,
    )


def choose(
    logits: torch.Tensor,
    edited: torch.Tensor | None,
    rows: torch.Tensor,
    state: torch.Tensor,
    summaries: Summaries,
    filters: FilterScratch | None,
    last_tokens: torch.Tensor,
    tokens_out: torch.Tensor,
    *,
    draws: bool,
    block: int,
    search: SearchShape,
) -> None:
    """Choose from what was found: tokens_out int32 [batch], last_tokens int32 [max_rows + 1] at each row."""
    batch, vocab = logits.shape
    num_blocks = summaries.best.shape[1]
    dependent(_choose, (batch,), rows.device)(
        logits,
        edited,
        rows,
        state,
        *summaries,
        *((None,) * 8 if filters is None else filters[1:]),
        last_tokens,
        tokens_out,
        logits.stride(0),
        vocab,
        num_blocks,
        state.shape[0] - 1,
        BLOCK=block,
        SUMMARIES=next_power_of_2(num_blocks),
        LIST=0 if filters is None else filters.list_ids.shape[1],
        CHUNK=search.chunk,
        PART=search.part,
        FAN=search.fan,
        DRAWS=draws,
        FILTERS=filters is not None,
        EDITS=edited is not None,
        num_warps=8 if draws else 1,
    )
