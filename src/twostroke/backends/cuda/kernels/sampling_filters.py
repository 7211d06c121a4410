"""Top-k, top-p and min-p without sorting: where a row's border lies, and which tokens may be at it. A floor below which
nothing is kept; without top-k, the scores above it narrowed in two passes to the bracket that holds the border; what
lies inside is listed, for sampling_search.py to find the exact border. Tokens rank by score, and among equals by id, so
a border is one rank, equal scores or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.sampling_state import SampledBatch
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import wait_and_start_next
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

ID_BITS = tl.constexpr(22)
"""Bits of a token id: a vocabulary may have no more ids than they count."""
NUM_MARKS = tl.constexpr(16)
"""Into how many parts a pass of narrowing cuts the bracket."""


class Summaries(NamedTuple):
    """What the survey of a batch finds, [batch, num_blocks] each."""

    best: torch.Tensor  # float32: the block's best score; NaN where one is not finite
    best_id: torch.Tensor  # int32: the lowest id that has it
    total: torch.Tensor  # float32: the sum of exp((score - best) / temperature)

    @classmethod
    def allocate(cls, batch: int, num_blocks: int, device: torch.device) -> Summaries:
        types = (torch.float32, torch.int32, torch.float32)
        return cls(*(torch.empty(batch, num_blocks, dtype=dtype, device=device) for dtype in types))


class FilterScratch(NamedTuple):
    """What the passes over filtered rows leave for each other."""

    column_best: torch.Tensor  # float32 [batch, num_columns]: the best score of each column
    floors: torch.Tensor  # float32 [batch]: no lower score is kept; infinity where a row has no filters
    targets: torch.Tensor  # float64 [batch]: the weight that top-p asks of a whole row; infinity without top-p
    marks: torch.Tensor
    """float32 [batch, 2, 1 + NUM_MARKS]: the scores that cut a bracket, its lowest first, for each narrowing."""
    amounts: torch.Tensor  # float32 [batch, 2, num_blocks, NUM_MARKS]: a block's weight at or above each mark
    brackets: torch.Tensor
    """float32 [batch, 3]: the lowest score that can be at the border, the highest (exclusive), and the mark it is at.
    What one kernel decides the next ones read: decided twice, a sum in another order might decide otherwise."""
    list_counts: torch.Tensor  # int32 [batch]: candidates found; more than a list holds where it overflowed
    list_ids: torch.Tensor  # int32 [batch, list_size]
    list_scores: torch.Tensor  # float32 [batch, list_size]

    @classmethod
    def allocate(
        cls, batch: int, num_blocks: int, num_columns: int, list_size: int, device: torch.device
    ) -> FilterScratch:
        marks = int(NUM_MARKS.value)

        def floats(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        return cls(
            column_best=floats(batch, num_columns),
            floors=floats(batch),
            targets=torch.empty(batch, dtype=torch.float64, device=device),
            marks=floats(batch, 2, 1 + marks),
            amounts=floats(batch, 2, num_blocks, marks),
            brackets=floats(batch, 3),
            list_counts=torch.empty(batch, dtype=torch.int32, device=device),
            list_ids=torch.empty(batch, list_size, dtype=torch.int32, device=device),
            list_scores=floats(batch, list_size),
        )


@triton.jit
def of_blocks(found, entry, num_blocks, other, SUMMARIES: tl.constexpr):
    """What was found of every block of a batch entry; `other` beyond the last."""
    places = tl.arange(0, SUMMARIES)
    return tl.load(found + entry * num_blocks + places, mask=places < num_blocks, other=other)


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
    batch, summaries, filters, vocab, num_blocks, num_columns,
    SUMMARIES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A score that every kept token reaches, for one row; infinity for a row without filters. Two bounds beside min-p.
    The best of each of k columns are k scores: none below the least of them is in the top k. And tokens that each weigh
    less than (1 - top_p) / vocab of the whole weigh less than 1 - top_p together: the nucleus is complete without."""
    wait_and_start_next(PDL)
    entry = tl.program_id(0)
    record = state.record_of(batch, entry)
    scale = state.float_word(record, state.SCALE)
    top_p = state.float_word(record, state.TOP_P)
    min_p = state.float_word(record, state.MIN_P)
    top_k = tl.load(record + state.TOP_K).to(tl.int32)
    floor = tl.full([], float("inf"), tl.float32)
    target = tl.full([], float("inf"), tl.float64)
    if (scale > 0.0) & ((top_k > 0) | (top_p > 0.0) | (min_p > 0.0)):
        bests = of_blocks(summaries.best, entry, num_blocks, state.NEGATIVE_INFINITY, SUMMARIES)
        totals = of_blocks(summaries.total, entry, num_blocks, 0.0, SUMMARIES)
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
        below = tl.maximum(below - tl.abs(below) * 1e-6, -state.FLOAT32_MAX)
        # Masked tokens are below any floor: a grammar masks most, and a list would overflow with them.
        floor = tl.where(least > 0.0, below, -state.FLOAT32_MAX).to(tl.float32)
        if (top_k > 0) & (top_k <= num_columns):
            column_bests = of_blocks(filters.column_best, entry, num_columns, state.NEGATIVE_INFINITY, COLUMNS)
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
    tl.store(filters.floors + entry, floor)
    tl.store(filters.targets + entry, target)
    tl.store(filters.list_counts + entry, 0)


@triton.jit
def narrowed(entry, pass_index, filters, num_blocks, SUMMARIES: tl.constexpr):
    """The part of a pass's bracket in which the weight at or above falls below the target: its lower and upper score,
    and the number of the upper one's mark."""
    numbers = tl.arange(0, NUM_MARKS)
    blocks = tl.arange(0, SUMMARIES)
    slot = (entry * 2 + pass_index).to(tl.int64)
    scores = tl.load(filters.marks + slot * (NUM_MARKS + 1) + 1 + numbers)
    target = tl.load(filters.targets + entry)
    held = tl.load(
        filters.amounts + (slot * num_blocks + blocks[:, None]) * NUM_MARKS + numbers[None, :],
        mask=blocks[:, None] < num_blocks,
        other=0.0,
    )
    reached = tl.sum((tl.sum(held.to(tl.float64), axis=0) >= target).to(tl.int32), axis=0)
    lower = tl.load(filters.marks + slot * (NUM_MARKS + 1) + reached)
    upper = tl.min(tl.where(numbers == reached, scores, float("inf")), axis=0)
    return lower, upper, reached


@triton.jit
def is_narrowed(record):
    """Whether the row is one that `narrow` looks at: top-p of the whole row, or min-p, or both."""
    is_cut = (tl.load(record + state.TOP_P) != 0) | (tl.load(record + state.MIN_P) != 0)
    return (tl.load(record + state.SCALE) != 0) & is_cut & (tl.load(record + state.TOP_K) == 0)


@triton.jit
def narrow(
    batch, summaries, filters, stride, vocab, num_blocks,
    BLOCK: tl.constexpr, SUMMARIES: tl.constexpr, PASS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Cut a row's bracket into parts of equal width, and weigh what one block holds at or above each mark. Tokens that
    min-p drops weigh nothing: if the rest does not hold top_p of the whole, all of the rest is kept."""
    wait_and_start_next(PDL)
    block = tl.program_id(0)
    entry = tl.program_id(1)
    record = state.record_of(batch, entry)
    if is_narrowed(record):
        scale = state.float_word(record, state.SCALE)
        min_p = state.float_word(record, state.MIN_P).to(tl.float32)
        best = tl.max(of_blocks(summaries.best, entry, num_blocks, state.NEGATIVE_INFINITY, SUMMARIES), axis=0)
        low = tl.load(filters.floors + entry)
        high = best
        if PASS == 1:
            low, high, _ = narrowed(entry, 0, filters, num_blocks, SUMMARIES)
        slot = (entry * 2 + PASS).to(tl.int64)
        _, scores = state.scores_of(state.source_of(batch, record, entry, stride, vocab), block, vocab, BLOCK)
        weights = weigh(scores, best, scale)
        weights = tl.where(weights >= min_p, weights, 0.0)
        if block == 0:
            tl.store(filters.marks + slot * (NUM_MARKS + 1), low)
        for number in tl.static_range(NUM_MARKS):
            mark = tl.minimum(low + (high - low) * ((number + 1) / NUM_MARKS), high)
            if number == NUM_MARKS - 1:
                mark = high
            held = tl.sum(tl.where(scores >= mark, weights, 0.0), axis=0)
            tl.store(filters.amounts + (slot * num_blocks + block) * NUM_MARKS + number, held)
            if block == 0:
                # What the readers compare with must be the very mark that was weighed.
                tl.store(filters.marks + slot * (NUM_MARKS + 1) + 1 + number, mark)


@triton.jit
def list_candidates(
    batch, summaries, filters, stride, vocab, num_blocks,
    BLOCK: tl.constexpr, SUMMARIES: tl.constexpr, LIST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """List the tokens of one block that lie in the row's bracket. Blocks come in any order: what reads the list does
    not mind. The count goes on past what the list can hold, which tells its reader."""
    wait_and_start_next(PDL)
    block = tl.program_id(0)
    entry = tl.program_id(1)
    record = state.record_of(batch, entry)
    low = tl.load(filters.floors + entry)
    high = tl.full([], float("inf"), tl.float32)
    mark = tl.full([], NUM_MARKS, tl.int32)
    if is_narrowed(record):
        low, high, mark = narrowed(entry, 1, filters, num_blocks, SUMMARIES)
    if block == 0:
        tl.store(filters.brackets + entry * 3, low)
        tl.store(filters.brackets + entry * 3 + 1, high)
        tl.store(filters.brackets + entry * 3 + 2, mark.to(tl.float32))
    if tl.load(summaries.best + entry * num_blocks + block) >= low:
        ids, scores = state.scores_of(state.source_of(batch, record, entry, stride, vocab), block, vocab, BLOCK)
        is_listed = (scores >= low) & (scores < high) & (ids < vocab)
        running = tl.cumsum(is_listed.to(tl.int32), axis=0)
        count = tl.max(running, axis=0)
        if count > 0:
            slots = tl.atomic_add(filters.list_counts + entry, count) + running - 1
            fits = is_listed & (slots < LIST)
            tl.store(filters.list_ids + entry * LIST + slots, ids, mask=fits)
            tl.store(filters.list_scores + entry * LIST + slots, scores, mask=fits)


def filter_rows(batch: SampledBatch, summaries: Summaries, filters: FilterScratch, *, block: int) -> None:
    """Bracket and list, for each row with filters, the candidates that may be at its border."""
    (num_rows, vocab), device = batch.logits.shape, batch.logits.device
    num_blocks, num_columns = summaries.best.shape[1], filters.column_best.shape[1]
    width = next_power_of_2(num_blocks)
    dependent(find_floor, (num_rows,), device)(
        batch, summaries, filters, vocab, num_blocks, num_columns,
        SUMMARIES=width, COLUMNS=next_power_of_2(num_columns), num_warps=4,
    )  # fmt: skip
    arguments = (batch, summaries, filters, batch.logits.stride(0), vocab, num_blocks, block, width)
    for index in range(2):
        dependent(narrow, (num_blocks, num_rows), device)(*arguments, PASS=index, num_warps=4)
    list_size = filters.list_ids.shape[1]
    dependent(list_candidates, (num_blocks, num_rows), device)(*arguments, LIST=list_size, num_warps=8)
