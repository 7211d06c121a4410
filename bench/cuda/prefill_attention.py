"""Prefill attention on the card: our kernels beside each other, cuDNN's for comparison. Variants of the flash kernel
first run with bounded waits in a process of their own, so that a deadlock costs a second, not the run."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cuda.attention_cases import Model, Pool, Result, graph_seconds, relative_error, say, try_each
from twostroke.backends.cuda.kernels import flash_prefill
from twostroke.backends.cuda.kernels.flash_prefill import FlashOptions, attend_prefill_flash
from twostroke.backends.cuda.kernels.hopper_prefill import attend_prefill_hopper
from twostroke.backends.cuda.kernels.prefill_attention import attend_prefill, prefill_config
from twostroke.backends.cuda.kernels.prefill_tiles import (
    PrefillScratch,
    PrefillTiles,
    PrefillWork,
    unsupported_on_hopper,
)

FLASH_VARIANTS = {
    "flash": FlashOptions(),
    "flash, pinned": FlashOptions(pinned=True),
    "flash, no turns": FlashOptions(take_turns=False),
    "flash, no slack": FlashOptions(slack=0),
    "flash, all heads at once": FlashOptions(cached_bytes=1 << 40),
    "flash, 16 MiB cached": FlashOptions(cached_bytes=16 << 20),
    "flash, 128 keys": FlashOptions(keys=128),
    "flash, 128 keys, pinned": FlashOptions(keys=128, pinned=True),
    "flash, 128 keys, pinned, no turns": FlashOptions(keys=128, pinned=True, take_turns=False),
    "flash, held queries": FlashOptions(keys=128, pinned=True, held_queries=True),
    "flash, held queries, no turns": FlashOptions(keys=128, pinned=True, held_queries=True, take_turns=False),
    "flash, tile 192": FlashOptions(keys=128, pinned=True, warp_groups=3),
}
CHECKED_SEGMENTS = ([700, 1, 300, 1500], [0, 63, 4000, 129])
CHECK_SECONDS = 45


def flash_variants(model: Model, wanted: Sequence[str]) -> dict[str, FlashOptions]:
    """Those that have one of these words, as far as the model and the device can have them."""
    capability = torch.cuda.get_device_capability()
    reason = flash_prefill.unsupported(model.head_dim, model.page, model.dtype, capability)
    if reason is not None:
        say(f"no flash kernel: {reason}")
        return {}
    return {
        name: options
        for name, options in FLASH_VARIANTS.items()
        if any(word in name for word in wanted) and (options.warp_groups == 2 or model.head_dim == 64)
    }


def passing_variants(model: Model, variants: dict[str, FlashOptions]) -> dict[str, FlashOptions]:
    """Those that give the right result with bounded waits. A process that dies takes one variant with it."""
    left, passed = list(variants), []
    while left:
        command = [
            sys.executable, "-m", "bench.cuda.attention", "--check-flash", ";".join(left), "--page", str(model.page),
            "--heads", str(model.heads), "--kv-heads", str(model.kv_heads), "--head-dim", str(model.head_dim),
            "--dtype", str(model.dtype).removeprefix("torch."),
        ]  # fmt: skip
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
            output, fault = run.stdout, run.stderr.strip().splitlines()[-1:]
        except subprocess.TimeoutExpired as expired:
            output, fault = (expired.stdout or b"").decode(), ["it hangs"]
        lines = [line.split("|") for line in output.splitlines() if "|" in line]
        for name, verdict in lines:
            say(f"check: {name}: {verdict}")
            left.remove(name)
            if verdict.startswith("right"):
                passed.append(name)
        if left:
            say(f"FAILED: check: {left.pop(0)}: {fault}")
    return {name: options for name, options in variants.items() if name in passed}


def check_flash(model: Model, names: Sequence[str]) -> None:
    """Every token of a few segments against today's kernel, and one in a hundred against float32."""
    counts, starts = CHECKED_SEGMENTS
    pool = Pool(model, 1 << 14)
    step = Step(model, pool, counts, starts)
    expected = step.run(128, attend_prefill_hopper).clone()
    for name in names:
        options = replace(FLASH_VARIANTS[name], bounded=True)
        outs = [step.run(options.tile_rows, attend_prefill_flash, options=options).clone() for _ in range(3)]
        error = max(step.error(range(0, sum(counts), 100)), relative_error(outs[0], expected.float()))
        same = all(torch.equal(out, outs[0]) for out in outs)
        verdict = "right" if error < 1e-2 and same else "WRONG"
        print(f"{name}|{verdict}, error {error:.1e}, {'the same' if same else 'NOT THE SAME'} each time", flush=True)


class Step:
    """Segments of the given sizes and one layer's queries for them."""

    def __init__(self, model: Model, pool: Pool, counts: Sequence[int], starts: Sequence[int]) -> None:
        self.model, self.pool, self.counts, self.starts = model, pool, list(counts), list(starts)
        self.tables = pool.tables([start + count for start, count in zip(starts, counts, strict=True)])[:8]
        self.firsts = [0, *accumulate(counts)][:-1]
        tokens = sum(counts)
        fused = torch.randn(
            (tokens, model.heads + 2 * model.kv_heads, model.head_dim), dtype=model.dtype, device="cuda"
        )
        self.queries = fused[:, : model.heads]
        self.out = torch.empty((tokens, model.heads * model.head_dim), dtype=model.dtype, device="cuda")
        self.scratch = PrefillScratch(model.kv_heads, model.head_dim, "cuda", model.num_sms, tile_rows=192)

    @property
    def floating_operations(self) -> int:
        """Two products of two operations each over every pair of a query and a key that it reads."""
        pairs = sum(n * start + n * (n + 1) // 2 for n, start in zip(self.counts, self.starts, strict=True))
        return 4 * self.model.heads * self.model.head_dim * pairs

    def launches(self, tile_rows: int, attend: Callable[..., None], **options: object) -> list[Callable[[], None]]:
        model = self.model
        tiles = PrefillTiles.build(
            self.firsts, self.counts, self.starts, range(len(self.counts)),
            tile_rows=tile_rows, group=model.group, kv_heads=model.kv_heads, num_sms=model.num_sms,
        )  # fmt: skip
        work = PrefillWork.of(tiles, "cuda")

        def launch(table: torch.Tensor) -> None:
            attend(
                self.queries, self.pool.k, self.pool.v, table, work, self.out,
                scale=model.head_dim**-0.5, scratch=self.scratch, **options,
            )  # fmt: skip

        return [partial(launch, table) for table in self.tables]

    def run(self, tile_rows: int, attend: Callable[..., None], **options: object) -> torch.Tensor:
        """The result over the first table."""
        self.out.fill_(float("nan"))
        self.launches(tile_rows, attend, **options)[0]()
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

    def measure(self, tile_rows: int, attend: Callable[..., None], **options: object) -> tuple[float, float]:
        tokens = sum(self.counts)
        chosen = sorted({0, tokens - 1, *random.sample(range(tokens), min(14, tokens))})
        first = self.run(tile_rows, attend, **options).clone()
        error = self.error(chosen)
        seconds = graph_seconds(self.launches(tile_rows, attend, **options), repeats=5)
        again = self.run(tile_rows, attend, **options)
        return error if torch.equal(first, again) else float("nan"), seconds

    def measure_cudnn(self) -> tuple[float, float]:
        """Over contiguous keys, and fresh prompts of one length only."""
        model, count = self.model, self.counts[0]
        blocks = self.tables[0][: len(self.counts), : count // model.page].long()

        def gather(cache: torch.Tensor) -> torch.Tensor:
            pages = cache[blocks].transpose(1, 2)  # [segments, kv_heads, pages, page, head_dim]
            return pages.reshape(len(self.counts), model.kv_heads, count, model.head_dim).contiguous()

        k, v = gather(self.pool.k), gather(self.pool.v)
        q = self.queries.reshape(len(self.counts), count, model.heads, model.head_dim).transpose(1, 2).contiguous()

        def launch() -> torch.Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        self.out.copy_(launch().transpose(1, 2).reshape_as(self.out))
        return self.error([0, sum(self.counts) - 1]), graph_seconds([launch] * 4, repeats=5)


def prefill_result(
    name: str, counts: Sequence[int], start: int, model: Model, pool: Pool, variants: dict[str, FlashOptions]
) -> Result:
    step = Step(model, pool, counts, [start] * len(counts))
    choices: dict[str, Callable[[], tuple[float, float]]] = {}
    reason = unsupported_on_hopper(model.head_dim, model.page, model.dtype, torch.cuda.get_device_capability())
    if reason is None:
        for tile_rows in (128, 64):
            choices[f"Gluon, tile {tile_rows}"] = partial(step.measure, tile_rows, attend_prefill_hopper)
    else:
        say(f"no Hopper kernel: {reason}")
    for label, options in variants.items():
        choices[label] = partial(step.measure, options.tile_rows, attend_prefill_flash, options=options)
    if start == 0 and len(set(counts)) == 1:
        choices["cuDNN, contiguous"] = step.measure_cudnn
    if reason is not None:
        choices["plain"] = partial(step.measure, 128, attend_prefill, config=prefill_config(128, model.head_dim))
    return try_each(name, choices, step.floating_operations / 1e12, "TFLOP/s")
