"""A step's attention as a list of pieces of work, and the memory that pieces of one query meet in. A piece is a tile of
a prefill chunk's queries, which read each span of K and V together; or one query, of a decode, say; or, when there are
too few of these to keep every thread busy, one span of one query's keys."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import QueryBlockField
from twostroke.backends.cpu.memory import float_zeros, padded, zeros
from twostroke.backends.cpu.shape import SPAN, KernelShape, LayerHeads
from twostroke.backends.host.batch import Batch

Int32Array = npt.NDArray[np.int32]
PIECES_A_THREAD = 4
"""With fewer pieces than this for each thread, single queries are split: the last to end would keep all others
waiting."""
TILES_A_THREAD = 3


@dataclass(frozen=True, slots=True)
class Pieces:
    """[pieces, fields of QueryBlockField] each."""

    blocks: Int32Array
    logit_blocks: Int32Array
    """Of the tokens whose logits are wanted alone."""
    chunk_blocks: Int32Array
    """Of latent attention, whose chunks go a way of their own."""
    head_parts: int = 1
    """Of latent attention: pieces that the heads of a query are cut into."""


class SpanRoom:
    """The memory that pieces of one query meet in."""

    def __init__(self, head_groups: int, result_floats: int) -> None:
        self._head_groups, self._result_floats = head_groups, result_floats
        self.results = float_zeros(0)
        self.counts = zeros((0,), np.int64)

    def make(self, num_spans: int) -> None:
        count = num_spans * self._head_groups
        if count > len(self.counts):
            self.results = float_zeros(2 * count * self._result_floats)
            self.counts = zeros((2 * count,), np.int64)


class AttentionWork:
    def __init__(
        self,
        shape: KernelShape,
        num_kv_heads: int,
        accumulators: int,
        threads: int,
        others: Collection[LayerHeads] = (),
    ) -> None:
        """`others`: of a model whose layers attend in several sizes. All share the pieces, which are such that any may
        take them."""
        self._reach = QueryBlockField.LAST if shape.both_ways else QueryBlockField.POSITION
        """The field that says how far a query sees."""
        every = [LayerHeads(num_kv_heads, shape), *others]
        self._together = max(one.shape.queries_together(accumulators) for one in every)
        self._tile = min(one.shape.queries_a_tile(accumulators) for one in every)
        groups = [one.num_kv_heads * one.shape.head_groups_per_kv_head for one in every]
        self._head_groups, self._threads = min(groups), threads
        self.room = SpanRoom(max(groups), max(one.shape.span_result_floats for one in every))

    def pieces(self, batch: Batch) -> Pieces:
        blocks = self.blocks(batch)
        logit_blocks = blocks if len(batch.logit_rows) == batch.num_tokens else self.logit_blocks(batch)
        return Pieces(blocks, logit_blocks, no_blocks())

    def blocks(self, batch: Batch) -> Int32Array:
        """[pieces, fields of QueryBlockField] of all tokens; makes room for the results of split queries."""
        count = batch.num_decodes
        tokens = batch.segment_first[:count]  # a decode is one token, and comes before all chunks
        singles = single_queries(batch, tokens, tokens)
        return self._joined(singles, batch, range(count, batch.num_segments))

    def logit_blocks(self, batch: Batch) -> Int32Array:
        """The same, of the tokens whose logits are wanted: all of a chunk are tiles of it, fewer are single queries."""
        if batch.num_segments == 1 and len(batch.logit_rows) == 1 and batch.num_tokens > 1:  # a prompt's last chunk
            only = single_queries(batch, batch.logit_rows, np.zeros(1, dtype=np.int32))
            return self._joined(only, batch, [])
        segments = np.searchsorted(batch.segment_first, batch.logit_rows, side="right") - 1  # [num_logits]
        wanted = np.bincount(segments, minlength=batch.num_segments)  # [num_segments]
        is_whole = (wanted == batch.segment_count) & (np.arange(batch.num_segments) >= batch.num_decodes)
        is_single = ~is_whole[segments]
        tokens = batch.logit_rows[is_single]
        singles = single_queries(batch, tokens, segments[is_single])
        return self._joined(singles, batch, np.flatnonzero(is_whole).tolist())

    def _joined(self, singles: Int32Array, batch: Batch, chunks: range | list[int]) -> Int32Array:
        if self._threads > 1 and 0 < len(singles) * self._head_groups < PIECES_A_THREAD * self._threads:
            singles = split_queries(singles, self._reach)
            self.room.make(len(singles))
        if not chunks:
            return singles
        tile = self._tile_for(int(batch.segment_count[chunks].sum()))
        return np.concatenate([singles, prefill_blocks(batch, chunks, tile)])

    def _tile_for(self, num_tokens: int) -> int:
        """As large a tile as still leaves every thread several pieces. A little more rather than less, which would
        leave a small piece over: those dealt in runs must cost nearly the same."""
        fair = -(-num_tokens * self._head_groups // (TILES_A_THREAD * self._threads))
        return min(self._tile, padded(fair, self._together))


def attends_by_rows(batch: Batch) -> bool:
    """Whether pieces may be dealt to threads in runs, so that a thread attends for rows that it has at hand: they must
    cost nearly the same, as the tiles of a chunk do that is short beside what precedes it."""
    return batch.num_segments == 1 and bool(batch.segment_start[0] >= batch.segment_count[0])


def _records(count: int) -> Int32Array:
    return np.zeros((count, len(QueryBlockField)), dtype=np.int32)


def no_blocks() -> Int32Array:
    return _records(0)


def single_queries(batch: Batch, tokens: Int32Array, segments: npt.NDArray[np.integer]) -> Int32Array:
    records = _records(len(tokens))
    records[:, QueryBlockField.TOKEN] = tokens
    records[:, QueryBlockField.COUNT] = 1
    records[:, QueryBlockField.POSITION] = batch.positions[tokens]
    records[:, QueryBlockField.SEGMENT] = segments
    records[:, QueryBlockField.LAST] = batch.segment_start[segments] + batch.segment_count[segments] - 1
    return records


def split_queries(singles: Int32Array, reach: QueryBlockField = QueryBlockField.POSITION) -> Int32Array:
    """A record for every span of SPAN positions that a query's context reaches into, which `reach` says; a single one
    is not split."""
    found: list[list[int]] = []
    for record in singles.tolist():  # few, or they would not be split: a loop is quicker than arrays
        first, spans = len(found), record[reach] // SPAN + 1
        record[QueryBlockField.FIRST_RESULT] = first
        record[QueryBlockField.NUM_SPANS] = spans if spans > 1 else 0
        for span in range(spans):
            record[QueryBlockField.SPAN] = span
            found.append(record.copy())
    return np.array(found, dtype=np.int32)


def prefill_blocks(batch: Batch, chunks: range | list[int], tile: int) -> Int32Array:
    """Tiles of `tile` tokens of these chunks; the last one of each may be smaller."""
    found = []
    for segment in chunks:
        count = int(batch.segment_count[segment])
        offsets = np.arange(0, count, tile)
        records = _records(len(offsets))
        records[:, QueryBlockField.TOKEN] = batch.segment_first[segment] + offsets
        records[:, QueryBlockField.COUNT] = np.minimum(tile, count - offsets)
        records[:, QueryBlockField.POSITION] = batch.segment_start[segment] + offsets
        records[:, QueryBlockField.SEGMENT] = segment
        records[:, QueryBlockField.LAST] = batch.segment_start[segment] + count - 1
        found.append(records)
    return np.concatenate(found)
