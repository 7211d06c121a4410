"""Attention as it is measured: one layer's KV of random numbers, block tables over pages of it in random order, more
than any cache holds, and plain float32 to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring

COLD_BYTES = 256 << 20
"""KV that a timing walks over before it comes back to the same pages: several times the second-level cache."""
MOST_TABLES = 32


@dataclass(frozen=True)
class Model:
    shape: AttentionShape
    scoring: Scoring
    num_sms: int
    device: str = "cuda"

    @property
    def token_bytes(self) -> int:
        return 2 * self.shape.kv_heads * self.shape.head_dim * 2

    def queries(self, tokens: int) -> torch.Tensor:
        """[tokens, heads, head_dim], cut out of a fused product's rows."""
        shape = self.shape
        rows = (tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        return torch.randn(rows, dtype=shape.dtype, device=self.device)[:, : shape.heads]

    def outputs(self, tokens: int) -> torch.Tensor:
        width = self.shape.heads * self.shape.head_dim
        return torch.empty((tokens, width), dtype=self.shape.dtype, device=self.device)


class Pool:
    """One layer's KV, and block tables over disjoint pages of it in random order."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        self.model = model
        self.num_blocks = num_tokens // model.shape.page
        shape = (self.num_blocks + 1, model.shape.kv_heads, model.shape.page, model.shape.head_dim)
        self.k = torch.randn(shape, dtype=model.shape.dtype, device=model.device)
        self.v = torch.randn(shape, dtype=model.shape.dtype, device=model.device)

    def tables(self, contexts: Sequence[int]) -> list[torch.Tensor]:
        """As many tables as it takes to walk COLD_BYTES, or as fit."""
        pages = [-(-context // self.model.shape.page) for context in contexts]
        wanted = -(-COLD_BYTES // (sum(contexts) * self.model.token_bytes))
        order = torch.randperm(self.num_blocks, dtype=torch.int32)
        tables, given = [], 0
        for _ in range(max(1, min(MOST_TABLES, wanted, self.num_blocks // sum(pages)))):
            table = torch.full((len(contexts) + 1, max(pages)), self.num_blocks, dtype=torch.int32)
            for row, count in enumerate(pages):
                table[row, :count] = order[given : given + count]
                given += count
            tables.append(table.to(self.model.device))
        return tables

    def reference(self, table: torch.Tensor, row: int, query: torch.Tensor, position: int) -> torch.Tensor:
        """One token's attention in float32, [heads, head_dim]."""
        shape, scoring = self.model.shape, self.model.scoring
        blocks = table[row, : position // shape.page + 1].long()
        oldest = 0 if scoring.window is None else max(0, position - scoring.window + 1)

        def gather(cache: torch.Tensor) -> torch.Tensor:
            return cache[blocks].transpose(1, 2).flatten(0, 1)[oldest : position + 1].float()

        query = query.float().view(shape.kv_heads, shape.group, -1)
        scores = torch.einsum("hgd,nhd->hgn", query, gather(self.k)) * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * (scores / scoring.softcap).tanh()
        return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), gather(self.v)).flatten(0, 1)


def graph_seconds(launches: Sequence[Callable[[], None]], repeats: int = 7) -> float:
    """Median seconds a launch, all of them in one graph."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(launches))
    return median(seconds)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float().view_as(expected) - expected).norm() / expected.norm())
