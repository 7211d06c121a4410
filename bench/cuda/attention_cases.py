"""What the measurements of attention on the card share: a paged pool, its float32 reference, times by graph replay over
KV that no cache holds, and a table of choices in which a failure is one line."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from twostroke.backends.cuda.kernels.paged import AttentionShape, Scoring

COLD_BYTES = 256 << 20
"""KV that a timing walks over before it comes back to the same pages: several times the second-level cache."""
STARTED = time.perf_counter()


@dataclass(frozen=True)
class Model:
    shape: AttentionShape
    scoring: Scoring
    num_sms: int

    @property
    def token_bytes(self) -> int:
        return 2 * self.shape.kv_heads * self.shape.head_dim * 2


class Pool:
    """One layer's KV, and block tables over disjoint pages of it in random order."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        self.model = model
        self.num_blocks = num_tokens // model.shape.page
        shape = (self.num_blocks + 1, model.shape.kv_heads, model.shape.page, model.shape.head_dim)
        self.k = torch.randn(shape, dtype=model.shape.dtype, device="cuda")
        self.v = torch.randn(shape, dtype=model.shape.dtype, device="cuda")

    def tables(self, contexts: Sequence[int]) -> list[torch.Tensor]:
        """As many tables as it takes to walk COLD_BYTES, or as fit."""
        pages = [-(-context // self.model.shape.page) for context in contexts]
        wanted = -(-COLD_BYTES // (sum(contexts) * self.model.token_bytes))
        order = torch.randperm(self.num_blocks, dtype=torch.int32)
        tables, given = [], 0
        for _ in range(max(1, min(32, wanted, self.num_blocks // sum(pages)))):
            table = torch.full((len(contexts) + 1, max(pages)), self.num_blocks, dtype=torch.int32)
            for row, count in enumerate(pages):
                table[row, :count] = order[given : given + count]
                given += count
            tables.append(table.cuda())
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


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}]", *words, flush=True)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float().view_as(expected) - expected).norm() / expected.norm())


@dataclass
class Result:
    name: str
    error: float
    default: float
    best: float
    unit: str
    best_choice: str
    default_us: float
    best_us: float


def try_each(name: str, choices: dict[str, Callable[[], tuple[float, float]]], amount: float, unit: str) -> Result:
    """Each choice gives its error and its seconds, the first being the default's; a failure is one line."""
    found: list[tuple[float, str, float]] = []
    for label, choice in choices.items():
        try:
            error, seconds = choice()
            found.append((seconds, label, error))
            say(f"{name:<22} {label:<44} error {error:.1e} {seconds * 1e6:9.1f} us {amount / seconds:8.2f} {unit}")
            if not error < 2e-2:
                say(f"WRONG: {name} {label}")
        except Exception as fault:
            say(f"FAILED: {name} {label}: {type(fault).__name__} {str(fault)[:160]}".replace("\n", " "))
    if not found:
        return Result(name, float("nan"), 0.0, 0.0, unit, "nothing ran", 0.0, 0.0)
    first = next(iter(choices))
    default = next((entry for entry in found if entry[1] == first), (float("inf"), first, float("nan")))
    best = min(found)
    worst_error = max(error for _, _, error in found)
    return Result(
        name, worst_error, amount / default[0], amount / best[0], unit, best[1], default[0] * 1e6, best[0] * 1e6
    )
