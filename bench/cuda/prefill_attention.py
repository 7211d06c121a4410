"""Prefill attention on the card: our kernels beside each other, cuDNN's for comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cuda.attention_cases import Result, say, try_each
from twostroke.backends.cuda.attention import choose_prefill
from twostroke.backends.cuda.attention_cases import Model, Pool, graph_seconds, relative_error
from twostroke.backends.cuda.kernels import flash_prefill, prefill_attention
from twostroke.backends.cuda.kernels.flash_prefill import FlashOptions
from twostroke.backends.cuda.kernels.paged import PagedKV, Scoring
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillTiles, PrefillWork, Tiling
from twostroke.backends.cuda.kernels.target import target_of

FLASH_OPTIONS = (
    FlashOptions(128, 192),
    FlashOptions(128, 128),
    FlashOptions(128, 64),
    FlashOptions(64, 128),
    FlashOptions(64, 64),
)
SM_SHARED_BYTES = 228 << 10


def flash_variants(model: Model) -> list[FlashOptions]:
    """As far as the model and the device can have them."""
    reason = flash_prefill.declines(model.shape, target_of("cuda"))
    if reason is not None:
        say(f"not {flash_prefill.NAME}: {reason}")
        return []
    return [
        options
        for options in FLASH_OPTIONS
        if options.programs_per_sm * (options.shared_bytes(model.shape.head_dim) + 1024) <= SM_SHARED_BYTES
        and (model.shape.head_dim <= 128 or options.tile_rows == flash_prefill.HIGH_TILE)
    ]


class Step:
    """Segments of the given sizes and one layer's queries for them."""

    def __init__(self, model: Model, pool: Pool, counts: Sequence[int], starts: Sequence[int]) -> None:
        self.model, self.pool, self.counts, self.starts = model, pool, list(counts), list(starts)
        self.tables = pool.tables([start + count for start, count in zip(starts, counts, strict=True)])[:8]
        self.firsts = [0, *accumulate(counts)][:-1]
        tokens = sum(counts)
        fused = torch.randn(
            (tokens, model.shape.heads + 2 * model.shape.kv_heads, model.shape.head_dim),
            dtype=model.shape.dtype,
            device="cuda",
        )
        self.queries = fused[:, : model.shape.heads]
        self.out = torch.empty(
            (tokens, model.shape.heads * model.shape.head_dim), dtype=model.shape.dtype, device="cuda"
        )
        self.scratch = PrefillScratch(self.tiling(128, programs_per_sm=2), model.shape.head_dim, "cuda")

    def tiling(self, tile_rows: int, programs_per_sm: int) -> Tiling:
        return Tiling(
            tile_rows, self.model.shape.group, self.model.shape.kv_heads, programs_per_sm * self.model.num_sms
        )

    @property
    def floating_operations(self) -> int:
        """Two products of two operations each over every pair of a query and a key that it reads."""
        window = self.model.scoring.window or 1 << 30
        positions = [start + i for n, start in zip(self.counts, self.starts, strict=True) for i in range(n)]
        return 4 * self.model.shape.heads * self.model.shape.head_dim * sum(min(at + 1, window) for at in positions)

    def launches(self, tiling: Tiling, attend: Callable[..., None], **options: object) -> list[Callable[[], None]]:
        tiles = PrefillTiles.build(self.firsts, self.counts, self.starts, range(len(self.counts)), tiling)
        work = PrefillWork.of(tiles, "cuda")

        def launch(table: torch.Tensor) -> None:
            kv = PagedKV(self.pool.k, self.pool.v, table)
            attend(self.queries, kv, work, self.out, self.model.scoring, self.scratch, **options)

        return [partial(launch, table) for table in self.tables]

    def run(self, tiling: Tiling, attend: Callable[..., None], **options: object) -> torch.Tensor:
        """The result over the first table."""
        self.out.fill_(float("nan"))
        self.launches(tiling, attend, **options)[0]()
        torch.cuda.synchronize()
        return self.out

    def error(self, chosen: Sequence[int]) -> float:
        """The largest of these tokens; NaN where anything is not finite."""
        if not bool(torch.isfinite(self.out).all()):
            return float("nan")
        errors = []
        for token in chosen:
            row = max(i for i, first in enumerate(self.firsts) if first <= token)
            position = self.starts[row] + token - self.firsts[row]
            expected = self.pool.reference(self.tables[0], row, self.queries[token], position)
            errors.append(relative_error(self.out[token], expected))
        return max(errors)

    def measure(self, tiling: Tiling, attend: Callable[..., None], **options: object) -> tuple[float, float]:
        tokens = sum(self.counts)
        chosen = sorted({0, tokens - 1, *random.sample(range(tokens), min(14, tokens))})
        first = self.run(tiling, attend, **options).clone()
        error = self.error(chosen)
        seconds = graph_seconds(self.launches(tiling, attend, **options), repeats=5)
        again = self.run(tiling, attend, **options)
        return error if torch.equal(first, again) else float("nan"), seconds

    def measure_cudnn(self) -> tuple[float, float]:
        """Over contiguous keys, and fresh prompts of one length only."""
        model, count = self.model, self.counts[0]
        blocks = self.tables[0][: len(self.counts), : count // model.shape.page].long()

        def gather(cache: torch.Tensor) -> torch.Tensor:
            pages = cache[blocks].transpose(1, 2)  # [segments, kv_heads, pages, page, head_dim]
            return pages.reshape(len(self.counts), model.shape.kv_heads, count, model.shape.head_dim).contiguous()

        k, v = gather(self.pool.k), gather(self.pool.v)
        q = (
            self.queries.reshape(len(self.counts), count, model.shape.heads, model.shape.head_dim)
            .transpose(1, 2)
            .contiguous()
        )

        def launch() -> torch.Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        self.out.copy_(launch().transpose(1, 2).reshape_as(self.out))
        return self.error([0, sum(self.counts) - 1]), graph_seconds([launch] * 4, repeats=5)


def prefill_result(name: str, counts: Sequence[int], start: int, model: Model, pool: Pool) -> Result:
    step = Step(model, pool, counts, [start] * len(counts))
    choices: dict[str, Callable[[], tuple[float, float]]] = {}
    for options in flash_variants(model):
        tiling = step.tiling(options.tile_rows, options.programs_per_sm)
        choose = partial(step.measure, tiling, flash_prefill.attend, options=options)
        choices[f"{flash_prefill.NAME}, tile {options.tile_rows}, {options.keys} keys"] = choose
    for tile_rows in (64, 128) if model.shape.head_dim <= 128 else (64,):
        tiling = step.tiling(tile_rows, programs_per_sm=2)
        choices[f"{prefill_attention.NAME}, tile {tile_rows}"] = partial(step.measure, tiling, prefill_attention.attend)
    if start == 0 and len(set(counts)) == 1 and replace(model.scoring, scale=1.0) == Scoring(1.0):
        choices["cuDNN, contiguous"] = step.measure_cudnn
    default = default_choice(model, sum(counts))
    ordered = {label: choices[label] for label in sorted(choices, key=lambda label: label != default)}
    return try_each(name, ordered, step.floating_operations / 1e12, "TFLOP/s")


def default_choice(model: Model, num_tokens: int) -> str:
    """The label of what a step of `num_tokens` tokens runs."""
    kernel, _ = choose_prefill(model.shape, target_of("cuda"))
    tile_rows = kernel.tiling(model.shape, num_tokens, model.num_sms).tile_rows
    if kernel is prefill_attention:
        return f"{kernel.NAME}, tile {tile_rows}"
    keys = flash_prefill.options_for(model.shape, tile_rows, model.scoring.window).keys
    return f"{kernel.NAME}, tile {tile_rows}, {keys} keys"
