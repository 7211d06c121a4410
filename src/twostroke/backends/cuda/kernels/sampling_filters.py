"""Top-k, top-p and min-p without sorting: where a row's border lies, and which tokens may be at it. A floor below which
nothing is kept; without top-k, the scores above it narrowed in two passes to the bracket that holds the border; what
lies inside is listed, for sampling_search.py to find the exact border. Tokens rank by score, and among equals by id, so
a border is one rank, equal scores or not."""

# Kernels are Triton: arguments have no types, and constants are in capitals.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from twostroke.backends.cuda.kernels.sampling_state import (
    FLOAT32_MAX,
    MIN_P,
    NEGATIVE_INFINITY,
    NUM_WORDS,
    SCALE,
    TOP_K,
    TOP_P,
    source_of,
)
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

ID_BITS = tl.constexpr(22)
"""A vocabulary may have so many ids."""
NUM_MARKS = tl.constexpr(16)
"""Into how many parts a pass of narrowing cuts the bracket."""


class FilterScratch(NamedTuple):
    """What the passes over filtered rows leave for each other."""

    column_best: torch.Tensor
    """float32 [batch, num_columns]: the best of every so many scores."""
    floors: torch.Tensor
    """float32 [batch]: no lower score is kept; infinity where a row has no filters."""
    targets: torch.Tensor
    """float64 [batch]: the weight that top-p asks of a whole row; infinity without top-p."""
    marks: torch.Tensor
    """float32 [batch, 2, 1 + NUM_MARKS]: the scores that cut a bracket, its lowest first, for each narrowing."""
    amounts: torch.Tensor
    """float32 [batch, 2, num_blocks, NUM_MARKS]: a block's weight at or above each mark."""
    brackets: torch.Tensor
    """float32 [batch, 3]: the lowest score that can be at the border, the highest (exclusive), and the mark it is at.
    What one kernel decides the next ones read: decided twice, a sum in another order might decide otherwise."""
    list_counts: torch.Tensor
    """int32 [batch]: candidates found; more than a list holds where it overflowed."""
    list_ids: torch.Tensor
    """int32 [batch, list_size]"""
    list_scores: torch.Tensor
    """float32 [batch, list_size]"""

    @classmethod
    def allocate(
        cls, batch: int, num_blocks: int, num_columns: int, list_size: int, device: torch.device
    ) -> FilterScratch:
        marks = int(NUM_MARKS.value)
        return cls(
            torch.empty(batch, num_columns, dtype=torch.float32, device=device),
            torch.empty(batch, dtype=torch.float32, device=device),
            torch.empty(batch, dtype=torch.float64, device=device),
            torch.empty(batch, 2, 1 + marks, dtype=torch.float32, device=device),
            torch.empty(batch, 2, num_blocks, marks, dtype=torch.float32, device=device),
            torch.empty(batch, 3, dtype=torch.float32, device=device),
            torch.empty(batch, dtype=torch.int32, device=device),
            torch.empty(batch, list_size, dtype=torch.int32, device=device),
            torch.empty(batch, list_size, dtype=torch.float32, device=device),
        )


@triton.jit
def order_code(scores):
    """int32 that ascends as the scores do; 0.0 and -0.0 are one."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(scores, ids):
    """int64, higher for a higher score, and among equals for a lower id."""
    return (order_code(scores).to(tl.int64) << ID_BITS) - ids


@triton.jit
def weigh(scores, best, scale):
    """float32 weights relative to the best score's, which is 1."""
    return tl.exp2((scores - best) * scale.to(tl.float32))


@triton.jit
def find_floor(
    rows,
    state,
    block_best,
    block_total,
    column_best,
    floors,
    targets,
    list_counts,
    vocab,
    num_blocks,
    num_columns,
    SUMMARIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A score that every kept token reaches, for one row; infinity for a row without filters. Two bounds beside min-p.
    The best of each of k columns are k scores: none below the least of them is in the top k. And tokens that each weigh
    less than (1 - top_p) / vocab of the whole weigh less than 1 - top_p together: the nucleus is complete without."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    entry = tl.program_id(0)
    record = state + tl.load(rows + entry).to(tl.int64) * NUM_WORDS
    scale = tl.load(record + SCALE).to(tl.float64, bitcast=True)
    top_p = tl.load(record + TOP_P).to(tl.float64, bitcast=True)
    min_p = tl.load(record + MIN_P).to(tl.float64, bitcast=True)
    top_k = tl.load(record + TOP_K).to(tl.int32)
    floor = tl.full([], float("inf"), tl.float32)
    target = tl.full([], float("inf"), tl.float64)
    if (scale > 0.0) & ((top_k > 0) | (top_p > 0.0) | (min_p > 0.0)):
        places = tl.arange(0, SUMMARIES)
        summary = entry * num_blocks + places
        bests = tl.load(block_best + summary, mask=places < num_blocks, other=NEGATIVE_INFINITY)
        totals = tl.load(block_total + summary, mask=places < num_blocks, other=0.0)
        best = tl.max(bests, axis=0)
        least = min_p
        if top_p > 0.0:
            reaches = tl.exp2((bests.to(tl.float64) - best.to(tl.float64)) * scale)
            total = tl.sum(totals.to(tl.float64) * reaches, axis=0)
            target = top_p * total
            # Under top-k the nucleus is counted in the weight of the top k, which needs all of them.
            least = tl.where(top_k > 0, 0.0, tl.maximum(min_p, (1.0 - top_p) * total / vocab))
        # A little below, so that rounding drops nothing that is kept.
        below = best.to(tl.float64) + tl.log2(tl.maximum(least * 0.999, 1e-300)) / scale
        below = tl.maximum(below - tl.abs(below) * 1e-6, -FLOAT32_MAX)
        # Masked tokens are below any floor: a grammar masks most, and a list would overflow with them.
        floor = tl.where(least > 0.0, below, -FLOAT32_MAX).to(tl.float32)
        if (top_k > 0) & (top_k <= num_columns):
            columns = tl.arange(0, COLUMNS)
            column_bests = tl.load(
                column_best + entry * num_columns + columns, mask=columns < num_columns, other=NEGATIVE_INFINITY
            )
            codes = order_code(column_bests).to(tl.int64)
            low = tl.min(codes, axis=0)
            high = tl.max(codes, axis=0) + 1
            count = num_columns + 0
            while (high - low > 1) & (count != top_k):
                middle = low + ((high - low) >> 1)
                middle_count = tl.sum((codes >= middle).to(tl.int32), axis=0)
                reaches = middle_count >= top_k
                low = tl.where(reaches, middle, low)
                high = tl.where(reaches, high, middle)
                count = tl.where(reaches, middle_count, count)
            floor = tl.maximum(floor, tl.min(tl.where(codes >= low, column_bests, float("inf")), axis=0))
    tl.store(floors + entry, floor)
    tl.store(targets + entry, target)
    tl.store(list_counts + entry, 0)


@triton.jit
def narrowed(entry, pass_index, marks, amounts, target, num_blocks, SUMMARIES: tl.constexpr):
    """The part of a pass's bracket in which the weight at or above falls below the target: its lower and upper score,
    and the number of the upper one's mark."""
    numbers = tl.arange(0, NUM_MARKS)
    blocks = tl.arange(0, SUMMARIES)
    slot = (entry * 2 + pass_index).to(tl.int64)
    scores = tl.load(marks + slot * (NUM_MARKS + 1) + 1 + numbers)
    held = tl.load(
        amounts + (slot * num_blocks + blocks[:, None]) * NUM_MARKS + numbers[None, :],
        mask=blocks[:, None] < num_blocks,
        other=0.0,
    )
    reached = tl.sum((tl.sum(held.to(tl.float64), axis=0) >= target).to(tl.int32), axis=0)
    lower = tl.load(marks + slot * (NUM_MARKS + 1) + reached)
    upper = tl.min(tl.where(numbers == reached, scores, float("inf")), axis=0)
    return lower, upper, reached


@triton.jit
def is_narrowed(record):
    """Whether the row is one that `narrow` looks at: top-p of the whole row, or min-p, or both."""
    is_cut = (tl.load(record + TOP_P) != 0) | (tl.load(record + MIN_P) != 0)
    return (tl.load(record + SCALE) != 0) & is_cut & (tl.load(record + TOP_K) == 0)


@triton.jit
def narrow(
    logits,
    edited,
    rows,
    state,
    block_best,
    floors,
    targets,
    marks,
    amounts,
    stride,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    SUMMARIES: tl.constexpr,
    PASS: tl.constexpr,
    EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut a row's bracket into parts of equal width, and weigh what one block holds at or above each mark. Tokens that
    min-p drops weigh nothing: if the rest does not hold top_p of the whole, all of the rest is kept."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    entry = tl.program_id(1)
    record = state + tl.load(rows + entry).to(tl.int64) * NUM_WORDS
    if is_narrowed(record):
        scale = tl.load(record + SCALE).to(tl.float64, bitcast=True)
        min_p = tl.load(record + MIN_P).to(tl.float64, bitcast=True).to(tl.float32)
        places = tl.arange(0, SUMMARIES)
        summary = entry * num_blocks + places
        bests = tl.load(block_best + summary, mask=places < num_blocks, other=NEGATIVE_INFINITY)
        best = tl.max(bests, axis=0)
        low = tl.load(floors + entry)
        high = best
        if PASS == 1:
            low, high, _ = narrowed(entry, 0, marks, amounts, tl.load(targets + entry), num_blocks, SUMMARIES)
        slot = (entry * 2 + PASS).to(tl.int64)
        ids = block * BLOCK + tl.arange(0, BLOCK)
        source = source_of(logits, edited, record, entry, stride, vocab, EDITS)
        scores = tl.load(source + ids, mask=ids < vocab, other=NEGATIVE_INFINITY)
        weights = weigh(scores, best, scale)
        weights = tl.where(weights >= min_p, weights, 0.0)
        if block == 0:
            tl.store(marks + slot * (NUM_MARKS + 1), low)
        for number in tl.static_range(NUM_MARKS):
            mark = tl.minimum(low + (high - low) * ((number + 1) / NUM_MARKS), high)
            if number == NUM_MARKS - 1:
                mark = high
            held = tl.sum(tl.where(scores >= mark, weights, 0.0), axis=0)
            tl.store(amounts + (slot * num_blocks + block) * NUM_MARKS + number, held)
            if block == 0:
                # What the readers compare with must be the very mark that was weighed.
                tl.store(marks + slot * (NUM_MARKS + 1) + 1 + number, mark)


@triton.jit
def list_candidates(
    logits,
    edited,
    rows,
    state,
    block_best,
    floors,
    targets,
    marks,
    amounts,
    brackets,
    list_counts,
    list_ids,
    list_scores,
    stride,
    vocab,
    num_blocks,
    BLOCK: tl.constexpr,
    SUMMARIES: tl.constexpr,
    LIST: tl.constexpr,
    EDITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """List the tokens of one block that lie in the row's bracket. Blocks come in any order: what reads the list does
    not mind. The count goes on past what the list can hold, which tells its reader."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = tl.program_id(0)
    entry = tl.program_id(1)
    record = state + tl.load(rows + entry).to(tl.int64) * NUM_WORDS
    low = tl.load(floors + entry)
    high = tl.full([], float("inf"), tl.float32)
    mark = tl.full([], NUM_MARKS, tl.int32)
    if is_narrowed(record):
        low, high, mark = narrowed(entry, 1, marks, amounts, tl.load(targets + entry), num_blocks, SUMMARIES)
    if block == 0:
        tl.store(brackets + entry * 3, low)
        tl.store(brackets + entry * 3 + 1, high)
        tl.store(brackets + entry * 3 + 2, mark.to(tl.float32))
    if tl.load(block_best + entry * num_blocks + block) >= low:
        ids = block * BLOCK + tl.arange(0, BLOCK)
        source = source_of(logits, edited, record, entry, stride, vocab, EDITS)
        scores = tl.load(source + ids, mask=ids < vocab, other=NEGATIVE_INFINITY)
        is_listed = (scores >= low) & (scores < high) & (ids < vocab)
        running = tl.cumsum(is_listed.to(tl.int32), axis=0)
        count = tl.max(running, axis=0)
        if count > 0:
            slots = tl.atomic_add(list_counts + entry, count) + running - 1
            fits = is_listed & (slots < LIST)
            tl.store(list_ids + entry * LIST + slots, ids, mask=fits)
            tl.store(list_scores + entry * LIST + slots, scores, mask=fits)


def filter_rows(
    logits: torch.Tensor,
    edited: torch.Tensor | None,
    rows: torch.Tensor,
    state: torch.Tensor,
    block_best: torch.Tensor,
    block_total: torch.Tensor,
    scratch: FilterScratch,
    *,
    block: int,
) -> None:
    """Bracket and list, for each row with filters, the candidates that may be at its border."""
    batch, vocab = logits.shape
    num_blocks, num_columns = block_best.shape[1], scratch.column_best.shape[1]
    summaries = next_power_of_2(num_blocks)
    dependent(find_floor, (batch,), rows.device)(
        rows,
        state,
        block_best,
        block_total,
        scratch.column_best,
        scratch.floors,
        scratch.targets,
        scratch.list_counts,
        vocab,
        num_blocks,
        num_columns,
        SUMMARIES=summaries,
        COLUMNS=next_power_of_2(num_columns),
        num_warps=4,
    )
    shared = (logits, edited, rows, state, block_best, *scratch[1:5])
    sizes = (logits.stride(0), vocab, num_blocks)
    options = {"BLOCK": block, "SUMMARIES": summaries, "EDITS": edited is not None}
    for index in range(2):
        dependent(narrow, (num_blocks, batch), rows.device)(*shared, *sizes, PASS=index, num_warps=4, **options)
    dependent(list_candidates, (num_blocks, batch), rows.device)(
        *shared, *scratch[5:], *sizes, LIST=scratch.list_ids.shape[1], num_warps=8, **options
    )
