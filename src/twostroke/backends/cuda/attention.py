"""Attention of a device, a verb for each phase. Which kernels serve is chosen once, by what the device and the model
are, and said; the choice among them by a step's sizes is made here and nowhere else."""

from __future__ import annotations

import torch

from twostroke.backends.cuda.batch import Batch
from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.prefill_attention import attend_prefill
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillTiles, PrefillWork
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.models.spec import ModelSpec

TILE_ROWS = 128
"""Queries of a tile, all heads of a KV head counted."""


class Attention:
    def __init__(
        self, spec: ModelSpec, block_size: int, device: torch.device, dtype: torch.dtype, max_rows: int
    ) -> None:
        self._group, self._kv_heads = spec.queries_per_kv_head, spec.num_kv_heads
        self._num_sms = target_of(device).num_sms
        heads, head_dim = spec.num_heads, spec.head_dim
        self._decode_scratch = DecodeScratch(max_rows, heads, self._kv_heads, head_dim, device, self._num_sms)
        self._prefill_scratch = PrefillScratch(self._kv_heads, head_dim, device, self._num_sms, TILE_ROWS)
        self.max_part_items = self._prefill_scratch.max_items
        self.notes: tuple[str, ...] = ()

    def tiles(self, batch: Batch, *, is_captured: bool) -> PrefillTiles:
        """The work of a step's chunks; padded to a fixed number of items where a graph is to serve any of its size."""
        sizes = {
            "tile_rows": TILE_ROWS,
            "group": self._group,
            "kv_heads": self._kv_heads,
            "num_sms": self._num_sms,
        }
        first, counts = batch.segment_first.tolist(), batch.segment_count.tolist()
        starts, rows = batch.segment_start.tolist(), batch.segment_rows.tolist()
        pad_items = PrefillTiles.capacity(batch.num_tokens, len(counts), **sizes) if is_captured else None
        return PrefillTiles.build(first, counts, starts, rows, **sizes, pad_items=pad_items)

    def decode(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        pdl: bool = False,
    ) -> None:
        attend_decode(
            queries,
            keys,
            values,
            table,
            rows,
            positions,
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            scratch=self._decode_scratch,
            pdl=pdl,
        )

    def prefill(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        work: PrefillWork,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        attend_prefill(
            queries,
            keys,
            values,
            table,
            work,
            out,
            scale=scale,
            window=window,
            softcap=softcap,
            scratch=self._prefill_scratch,
        )
