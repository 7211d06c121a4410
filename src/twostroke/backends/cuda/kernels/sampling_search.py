"""The exact border of a filtered row, and the draw from what it keeps, by one program. Reads the list that
sampling_filters.py made; or the whole row where that list overflowed, which is rare, slower, and as exact."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from twostroke.backends.cuda.kernels import sampling_state as state
from twostroke.backends.cuda.kernels.sampling_filters import NUM_MARKS, rank_of, weigh


@dataclass(frozen=True, slots=True)
class SearchShape:
    """How many candidates a round takes at a time, how many it sorts into blocks at a time, how many ranks it tries."""

    chunk: int = 1024
    part: int = 128
    fan: int = 8


@triton.jit
def whole_weights(scores, best, scale):
    """Weights as whole numbers, state.WEIGHT_ONE for the best."""
    return (weigh(scores, best, scale) * state.WEIGHT_ONE).to(tl.int64)


@triton.jit
def candidates(base_ids, base_scores, is_list, start, count, CHUNK: tl.constexpr):
    """Ids, scores and presence of some candidates: of the list, or of the whole row, where an id is its place."""
    places = start + tl.arange(0, CHUNK)
    exists = places < count
    ids = tl.where(is_list, tl.load(base_ids + places, mask=exists & is_list, other=0), places)
    scores = tl.load(base_scores + places, mask=exists, other=state.NEGATIVE_INFINITY)
    return ids, scores, exists


@triton.jit
def raise_cut(
    base_ids, base_scores, is_list, count, cut, top, by_weight, target, best, scale,
    CHUNK: tl.constexpr, FAN: tl.constexpr,
):  # fmt: skip
    """Raise a rank as far as the candidates at or above it still number `target`, or weigh that much; their weight too.
    FAN ranks are tried in each round; one candidate between two of them decides."""
    numbers = tl.arange(0, FAN)
    between = count + 1
    high_count = 0
    cut_weight = tl.zeros([], tl.int64)
    while (top - cut > 1) & (between > 1):
        step = (top - cut + FAN - 1) // FAN
        tried = cut + step * numbers
        counts = tl.zeros([FAN], tl.int32)
        weights = tl.zeros([FAN], tl.int64)
        start = 0
        while start < count:
            ids, scores, exists = candidates(base_ids, base_scores, is_list, start, count, CHUNK)
            is_above = (rank_of(scores, ids)[:, None] >= tried[None, :]) & exists[:, None]
            counts += tl.sum(is_above.to(tl.int32), axis=0)
            weights += tl.sum(tl.where(is_above, whole_weights(scores, best, scale)[:, None], 0), axis=0)
            start += CHUNK
        amounts = tl.where(by_weight, weights, counts.to(tl.int64))
        reached = tl.sum(((amounts >= target) & (tried < top)).to(tl.int32), axis=0)
        last = tl.maximum(reached - 1, 0)
        low_count = tl.sum(tl.where(numbers == last, counts, 0), axis=0)
        cut_weight = tl.sum(tl.where(numbers == last, weights, 0), axis=0)
        next_top = tl.minimum(cut + step * (last + 1), top)
        high_count = tl.where(next_top < top, tl.sum(tl.where(numbers == last + 1, counts, 0), axis=0), high_count)
        cut += step * last
        top = next_top
        between = low_count - high_count
    return cut, cut_weight


@triton.jit
def kept_weights(ids, scores, exists, cut, min_p, best, scale):
    weights = weigh(scores, best, scale)
    is_kept = exists & (rank_of(scores, ids) >= cut) & (weights >= min_p)
    return tl.where(is_kept, (weights * state.WEIGHT_ONE).to(tl.int64), 0)


@triton.jit
def weigh_blocks(
    base_ids, base_scores, is_list, count, above, cut, min_p, best, scale,
    BLOCK: tl.constexpr, SUMMARIES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The kept weight of each block of the vocabulary, int64 [SUMMARIES]."""
    blocks = tl.arange(0, SUMMARIES)
    held = tl.zeros([SUMMARIES], tl.int64)
    if is_list:
        held = (above.to(tl.float64) * state.WEIGHT_ONE).to(tl.int64)
    start = 0
    while start < count:
        ids, scores, exists = candidates(base_ids, base_scores, is_list, start, count, PART)
        weights = kept_weights(ids, scores, exists, cut, min_p, best, scale)
        is_inside = (ids // BLOCK)[:, None] == blocks[None, :]
        held += tl.sum(tl.where(is_inside, weights[:, None], 0), axis=0)
        start += PART
    return held


@triton.jit
def draw_filtered(
    source, record, entry, best, filters, vocab, num_blocks,
    BLOCK: tl.constexpr, SUMMARIES: tl.constexpr, LIST: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    FAN: tl.constexpr,
):  # fmt: skip
    """One draw from what top-k, then top-p, then min-p leave of a row."""
    scale = state.float_word(record, state.SCALE)
    top_p = state.float_word(record, state.TOP_P)
    min_p = state.float_word(record, state.MIN_P).to(tl.float32)
    top_k = tl.load(record + state.TOP_K)
    target = tl.load(filters.targets + entry)
    low = tl.load(filters.brackets + entry * 3)
    high = tl.load(filters.brackets + entry * 3 + 1)
    mark = tl.load(filters.brackets + entry * 3 + 2).to(tl.int32)
    blocks = tl.arange(0, SUMMARIES)
    above = tl.load(
        filters.amounts + ((entry * 2 + 1) * num_blocks + blocks) * NUM_MARKS + mark,
        mask=(blocks < num_blocks) & (mark < NUM_MARKS),
        other=0.0,
    )

    num_listed = tl.load(filters.list_counts + entry)
    is_list = num_listed <= LIST
    count = tl.where(is_list, num_listed, vocab)
    base_ids = filters.list_ids + entry * LIST
    base_scores = tl.where(is_list, filters.list_scores + entry * LIST, source)
    cut = rank_of(low, vocab - 1)
    top = rank_of(tl.minimum(high, best), tl.where(high <= best, vocab - 1, 0)) + 1
    # In a list the weight above the bracket is already there; in a whole row it is counted with the rest.
    target -= tl.where(is_list, tl.sum(above.to(tl.float64), axis=0), 0.0)
    target *= state.WEIGHT_ONE
    by_weight = top_k == 0
    unfinished = (top_k > 0) | (top_p > 0.0)
    while unfinished:  # top-k, then top-p of what it leaves
        needed = target.to(tl.int64)
        needed = tl.where(by_weight, needed + (needed.to(tl.float64) < target).to(tl.int64), top_k)
        cut, cut_weight = raise_cut(
            base_ids, base_scores, is_list, count, cut, top, by_weight, needed, best, scale, CHUNK, FAN
        )
        target = top_p * cut_weight.to(tl.float64)
        unfinished = (by_weight == 0) & (top_p > 0.0)
        by_weight = by_weight | True

    held = weigh_blocks(base_ids, base_scores, is_list, count, above, cut, min_p, best, scale, BLOCK, SUMMARIES, PART)
    running = tl.cumsum(held, axis=0)
    whole = tl.max(running, axis=0)
    at = tl.minimum((state.uniform(record) * whole.to(tl.float64)).to(tl.int64), whole - 1)
    block = tl.sum((running <= at).to(tl.int32), axis=0)
    before = tl.sum(tl.where(blocks < block, held, 0), axis=0)
    ids, scores = state.scores_of(source, block, vocab, BLOCK)
    inside = tl.cumsum(kept_weights(ids, scores, ids < vocab, cut, min_p, best, scale), axis=0)
    at_inside = tl.minimum(at - before, tl.max(inside, axis=0) - 1)
    return block * BLOCK + tl.sum((inside <= at_inside).to(tl.int32), axis=0)
