"""A step's work with latent attention as a list of pieces: one query of a decode, or a span of its keys, for some or
all of its heads; and tiles of chunks, which share the keys and values that are made of latents, head by head."""

from __future__ import annotations

from twostroke.backends.cpu.attention_work import (
    PIECES_A_THREAD,
    TILES_A_THREAD,
    Pieces,
    SpanRoom,
    no_blocks,
    prefill_blocks,
    single_queries,
    split_queries,
)
from twostroke.backends.cpu.memory import padded
from twostroke.backends.cpu.shape import CHUNK_TILE, KernelShape
from twostroke.backends.host.batch import Batch

_SMALLEST_TILE = 128
"""Making keys and values takes as long as some hundred queries need to attend: smaller tiles would make them again and
again."""


class LatentWork:
    def __init__(self, shape: KernelShape, accumulators: int, threads: int) -> None:
        assert shape.latent is not None
        self._together = shape.expanded.queries_together(accumulators)
        self._heads, self._groups = shape.latent.num_heads, shape.head_groups_per_kv_head
        self._threads = threads
        self.room = SpanRoom(self._groups, shape.span_result_floats)

    def pieces(self, batch: Batch) -> Pieces:
        """Decodes and chunks go ways of their own, whichever rows' logits are wanted: a row's numbers are the same."""
        count = batch.num_decodes
        tokens = batch.segment_first[:count]
        singles = single_queries(batch, tokens, tokens)
        wanted, parts = PIECES_A_THREAD * self._threads, 1
        if self._threads > 1 and 0 < count < wanted:
            singles = split_queries(singles)
            self.room.make(len(singles))
            parts = min(self._groups, -(-wanted // len(singles)))
        chunks = range(count, batch.num_segments)
        if not chunks:
            return Pieces(singles, no_blocks(), no_blocks(), parts)
        tile = self._tile_for(batch.num_tokens - count)
        return Pieces(singles, no_blocks(), prefill_blocks(batch, chunks, tile), parts)

    def _tile_for(self, num_tokens: int) -> int:
        fair = -(-num_tokens * self._heads // (TILES_A_THREAD * self._threads))
        return min(CHUNK_TILE, max(_SMALLEST_TILE, padded(fair, self._together)))
