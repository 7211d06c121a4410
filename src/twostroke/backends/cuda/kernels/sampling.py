"""One token for each row of a batch: a survey of every (row, block of the vocabulary), then one program a row chooses.
Greedy takes the best score, lowest id first; a draw inverts the cumulative distribution in id order. Which row it is in
the batch, and what else the batch holds, changes nothing: blocks lie at fixed places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.sampling_filters import FilterScratch, Summaries, of_blocks
from twostroke.backends.cuda.kernels.sampling_search import SearchShape, draw_filtered
from twostroke.backends.cuda.kernels.sampling_state import SampledBatch
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2


@triton.jit
def _survey(
    batch, summaries, filters, stride, vocab, num_blocks, num_columns,
    BLOCK: tl.constexpr, COLUMN: tl.constexpr, DRAWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Summarise one block of one row."""
    wait_and_start_next(PDL)
    block = tl.program_id(0)
    entry = tl.program_id(1)
    record = state.record_of(batch, entry)
    source = state.source_of(batch, record, entry, stride, vocab)
    ids, scores = state.scores_of(source, block, vocab, BLOCK)
    best, offset = tl.max(scores, axis=0, return_indices=True)
    is_sound = (tl.abs(scores) < float("inf")) | (ids >= vocab)
    if batch.edited is not None:
        is_sound = is_sound | (state.is_masked(record) & (scores == state.NEGATIVE_INFINITY))
    all_sound = tl.min(is_sound.to(tl.int32), axis=0)
    summary = entry * num_blocks + block
    tl.store(summaries.best + summary, tl.where(all_sound == 1, best, float("nan")))
    tl.store(summaries.best_id + summary, block * BLOCK + offset)
    if DRAWS:
        scale = state.float_word(record, state.SCALE).to(tl.float32)
        scale = tl.where(scale > 0.0, scale, 1.0)  # a greedy row's total is read by nobody
        reference = tl.where(best == state.NEGATIVE_INFINITY, 0.0, best)
        tl.store(summaries.total + summary, tl.sum(tl.exp2((scores - reference) * scale), axis=0))
    if filters is not None:
        bests = tl.max(tl.reshape(scores, [BLOCK // COLUMN, COLUMN]), axis=1)
        columns = block * (BLOCK // COLUMN) + tl.arange(0, BLOCK // COLUMN)
        tl.store(filters.column_best + entry * num_columns + columns, bests, mask=columns < num_columns)


@triton.jit
def _draw(source, record, best, block_bests, block_totals, vocab, BLOCK: tl.constexpr):
    """Invert the row's cumulative distribution: find the block by the blocks' totals, then the token inside it."""
    scale = state.float_word(record, state.SCALE)
    shares = tl.exp2((block_bests.to(tl.float64) - best.to(tl.float64)) * scale)
    running = tl.cumsum(block_totals.to(tl.float64) * shares, axis=0)
    total = tl.max(running, axis=0)
    target = state.uniform(record) * total
    # The last block of any weight, where rounding lets no running total exceed the target.
    block = tl.minimum(tl.sum((running <= target).to(tl.int32), 0), tl.sum((running < total).to(tl.int32), 0))
    places = tl.arange(0, running.shape[0])
    before = tl.max(tl.where(places < block, running, 0.0), axis=0)
    is_block = places == block
    share = tl.sum(tl.where(is_block, shares, 0.0), axis=0)
    block_best = tl.max(tl.where(is_block, block_bests, state.NEGATIVE_INFINITY), axis=0)

    _, scores = state.scores_of(source, block, vocab, BLOCK)
    weights = tl.exp2((scores.to(tl.float64) - block_best.to(tl.float64)) * scale)
    running_weight = tl.cumsum((weights * state.WEIGHT_ONE + 0.5).to(tl.int64), axis=0)
    whole = tl.max(running_weight, axis=0)
    inside_target = ((target - before) / share * state.WEIGHT_ONE).to(tl.int64)
    inside = tl.sum((running_weight <= tl.minimum(inside_target, whole - 1)).to(tl.int32), axis=0)
    return block * BLOCK + inside


@triton.jit
def _choose(
    batch, summaries, filters, last_tokens, tokens_out, stride, vocab, num_blocks, padding_row,
    BLOCK: tl.constexpr, SUMMARIES: tl.constexpr, LIST: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    FAN: tl.constexpr, DRAWS: tl.constexpr, ADVANCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose a row's token and advance the row, where rows do; -1 and nothing advanced where a logit was not finite."""
    wait_and_start_next(PDL)
    entry = tl.program_id(0)
    row = tl.load(batch.rows + entry)
    record = state.record_of(batch, entry)
    bests = of_blocks(summaries.best, entry, num_blocks, state.NEGATIVE_INFINITY, SUMMARIES)
    best_ids = of_blocks(summaries.best_id, entry, num_blocks, vocab, SUMMARIES)
    is_broken = tl.max((bests != bests).to(tl.int32), axis=0)
    best = tl.max(bests, axis=0)
    token = tl.min(tl.where(bests == best, best_ids, vocab), axis=0)
    if DRAWS:
        # A row with every token masked has no weight to draw by; it keeps the lowest id.
        if (is_broken == 0) & (best > state.NEGATIVE_INFINITY) & (tl.load(record + state.SCALE) != 0):
            totals = of_blocks(summaries.total, entry, num_blocks, 0.0, SUMMARIES)
            source = state.source_of(batch, record, entry, stride, vocab)
            is_plain = True
            if filters is not None:
                is_plain = tl.load(filters.floors + entry) == float("inf")
                if not is_plain:
                    token = draw_filtered(
                        source, record, entry, best, filters, vocab, num_blocks, BLOCK, SUMMARIES, LIST, CHUNK, PART,
                        FAN,
                    )  # fmt: skip
            if is_plain:
                token = _draw(source, record, best, bests, totals, vocab, BLOCK)
    tl.store(tokens_out + entry, tl.where(is_broken == 1, -1, token))
    if ADVANCES:
        if (is_broken == 0) & (row != padding_row):
            tl.store(last_tokens + row, token)
            tl.store(record + state.NUM_OUTPUT, tl.load(record + state.NUM_OUTPUT) + 1)
            if batch.edited is not None:
                counts_address = tl.load(record + state.COUNTS)
                if counts_address != 0:
                    count = counts_address.to(tl.pointer_type(tl.int32)) + token
                    tl.store(count, tl.load(count) + 2)


def survey(
    batch: SampledBatch, summaries: Summaries, filters: FilterScratch | None, *, draws: bool, block: int, column: int
) -> None:
    """Summarise every block of every row, and its columns where some row has filters."""
    logits, num_blocks = batch.logits, summaries.best.shape[1]
    num_columns = 0 if filters is None else filters.column_best.shape[1]
    dependent(_survey, (num_blocks, len(logits)), logits.device)(
        batch, summaries, filters, logits.stride(0), logits.shape[1], num_blocks, num_columns,
        BLOCK=block, COLUMN=column, DRAWS=draws, num_warps=4,
    )  # fmt: skip


def choose(
    batch: SampledBatch,
    summaries: Summaries,
    filters: FilterScratch | None,
    last_tokens: torch.Tensor | None,
    tokens_out: torch.Tensor,
    *,
    draws: bool,
    block: int,
    search: SearchShape,
) -> None:
    """Choose from what was found: tokens_out int32 [batch], last_tokens int32 [max_rows + 1] at each row; None: no row
    advances."""
    logits, num_blocks = batch.logits, summaries.best.shape[1]
    dependent(_choose, (len(logits),), logits.device)(
        batch, summaries, filters, last_tokens, tokens_out, logits.stride(0), logits.shape[1], num_blocks,
        len(batch.state) - 1, BLOCK=block, SUMMARIES=next_power_of_2(num_blocks),
        LIST=0 if filters is None else filters.list_ids.shape[1], CHUNK=search.chunk, PART=search.part,
        FAN=search.fan, DRAWS=draws, ADVANCES=last_tokens is not None, num_warps=8 if draws else 1,
    )  # fmt: skip
