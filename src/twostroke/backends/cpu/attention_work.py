"""A step's attention as a list of pieces of work, and the memory that pieces of one query meet in. A piece is a tile of
a prefill chunk's queries, which read each span of K and V together; or a decode's one query; or, when there are too
few of these to keep every thread busy, one span of a decode's keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import QueryBlockField
from twostroke.backends.cpu.memory import float_zeros, zeros
from twostroke.backends.cpu.shape import SPAN, KernelShape
from twostroke.backends.host.batch import Batch

Int32Array = npt.NDArray[np.int32]
_PIECES_A_THREAD = 4
"""With fewer pieces than this for each thread, decodes are split: the last to end would keep all others waiting."""
_TILES_A_THREAD = 3


class AttentionWork:
    def __init__(self, shape: KernelShape, num_kv_heads: int, accumulators: int, threads: int) -> None:
        self._together = shape.queries_together(accumulators)
        self._tile = shape.queries_a_tile(accumulators)
        self._head_groups = num_kv_heads * shape.head_groups_per_kv_head
        self._threads = threads
        self._result_floats = shape.span_result_floats
        self.span_results = float_zeros(0)
        self.span_counts = zeros((0,), np.int64)

    def blocks(self, batch: Batch) -> Int32Array:
        """[pieces, fields of QueryBlockField]; makes room for the results of split queries."""
        few = batch.num_decodes * self._head_groups < _PIECES_A_THREAD * self._threads
        split = self._threads > 1 and few
        decodes = split_decodes(batch) if split else whole_decodes(batch)
        if split:
            self._make_room(len(decodes))
        if batch.num_tokens == batch.num_decodes:
            return decodes
        return np.concatenate([decodes, prefill_blocks(batch, self._tile_for(batch.num_tokens - batch.num_decodes))])

    def _tile_for(self, num_tokens: int) -> int:
        """As large a tile as still leaves every thread several pieces."""
        fair = num_tokens * self._head_groups // (_TILES_A_THREAD * self._threads)
        return max(self._together, min(self._tile, fair // self._together * self._together))

    def _make_room(self, num_spans: int) -> None:
        count = num_spans * self._head_groups
        if count > len(self.span_counts):
            self.span_results = float_zeros(2 * count * self._result_floats)
            self.span_counts = zeros((2 * count,), np.int64)


def _records(count: int) -> Int32Array:
    return np.zeros((count, len(QueryBlockField)), dtype=np.int32)


def whole_decodes(batch: Batch) -> Int32Array:
    records = _records(batch.num_decodes)
    records[:, QueryBlockField.TOKEN] = records[:, QueryBlockField.SEGMENT] = np.arange(batch.num_decodes)
    records[:, QueryBlockField.COUNT] = 1
    records[:, QueryBlockField.POSITION] = batch.positions[: batch.num_decodes]
    return records


def split_decodes(batch: Batch) -> Int32Array:
    """A record for every span of SPAN positions that a decode's context reaches into; a single one is not split."""
    whole = whole_decodes(batch)
    spans = whole[:, QueryBlockField.POSITION] // SPAN + 1  # [num_decodes]
    records = np.repeat(whole, spans, axis=0)
    firsts = np.cumsum(spans) - spans
    records[:, QueryBlockField.SPAN] = np.arange(len(records)) - np.repeat(firsts, spans)
    records[:, QueryBlockField.FIRST_RESULT] = np.repeat(firsts, spans)
    records[:, QueryBlockField.NUM_SPANS] = np.repeat(np.where(spans > 1, spans, 0), spans)
    return records


def prefill_blocks(batch: Batch, tile: int) -> Int32Array:
    """Tiles of `tile` tokens of a chunk; the last one may be smaller."""
    found = [_records(0)]
    for segment in range(batch.num_decodes, batch.num_segments):
        count = int(batch.segment_count[segment])
        offsets = np.arange(0, count, tile)
        records = _records(len(offsets))
        records[:, QueryBlockField.TOKEN] = batch.segment_first[segment] + offsets
        records[:, QueryBlockField.COUNT] = np.minimum(tile, count - offsets)
        records[:, QueryBlockField.POSITION] = batch.segment_start[segment] + offsets
        records[:, QueryBlockField.SEGMENT] = segment
        found.append(records)
    return np.concatenate(found)
