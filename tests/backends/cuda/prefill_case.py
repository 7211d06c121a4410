"""Random prefill steps, for any kernel that runs them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tests.backends.cuda.paged import PagedCache, assert_near, attend, random_queries

from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillTiles, PrefillWork, Tiling


@dataclass
class PrefillCase:
    """Segments of the given counts and starts, in any rows, with queries around them that belong to nobody."""

    cache: PagedCache
    queries: torch.Tensor
    work: PrefillWork
    scratch: PrefillScratch
    out: torch.Tensor
    counts: list[int]
    starts: list[int]
    rows: list[int]
    first_tokens: list[int]

    @classmethod
    def random(
        cls,
        rng,
        counts,
        starts,
        shape,
        device,
        *,
        tile_rows=16,
        window=None,
        num_sms=1,
        padding=0,
        before=2,
        one_byte=None,
    ):
        contexts = [start + count for start, count in zip(starts, counts, strict=True)]
        rows = rng.permutation(len(counts)).tolist()
        by_row = [contexts[rows.index(row)] for row in range(len(rows))]
        cache = PagedCache.random(rng, by_row, shape, device, one_byte=one_byte)
        if window is not None:  # pages that no query can still read were given back
            for row, start in zip(rows, starts, strict=True):
                cache.table[row, : max(0, start - window + 1) // shape.page] = cache.k.shape[0] - 1
        # Decode tokens lie before the segments, padding behind them.
        first_tokens = (before + np.cumsum([0, *counts[:-1]])).tolist()
        num_tokens = before + sum(counts) + padding
        tiling = Tiling(tile_rows, shape.group, shape.kv_heads, programs=2 * num_sms)
        capacity = tiling.capacity(sum(counts), len(counts)) if padding else None
        tiles = PrefillTiles.build(first_tokens, counts, starts, rows, tiling, capacity)
        work = PrefillWork.of(tiles, device)
        scratch = PrefillScratch(tiling, shape.head_dim, device)
        scratch.partials.fill_(float("nan"))
        scratch.log_sums.fill_(float("nan"))
        out = torch.full((num_tokens, shape.heads * shape.head_dim), float("nan"), dtype=shape.dtype, device=device)
        queries = random_queries(rng, num_tokens, shape, device)
        return cls(cache, queries, work, scratch, out, list(counts), list(starts), rows, first_tokens)

    def run(self, attend_prefill, scoring, **options):
        attend_prefill(self.queries, self.cache.kv, self.work, self.out, scoring, self.scratch, **options)

    def check(self, scoring, sample=None, rng=None):
        """Every query of every segment, or `sample` of them, against plain arithmetic; all else is left as it was."""
        _, heads, head_dim = self.queries.shape
        touched = torch.zeros(len(self.out), dtype=torch.bool)
        for first, count, start, row in zip(self.first_tokens, self.counts, self.starts, self.rows, strict=True):
            touched[first : first + count] = True
            chosen = range(count) if sample is None else sorted({0, count - 1, *rng.integers(0, count, sample)})
            for i in chosen:
                query = self.queries[first + i].to(torch.float64).cpu().numpy()
                expected = attend(query, self.cache, row, start + int(i), scoring)
                assert_near(self.out[first + i].view(heads, head_dim), expected, self.out.dtype)
        assert self.out[~touched.to(self.out.device)].isnan().all(), "a query of nobody was written"
