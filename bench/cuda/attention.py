"""Attention on the card, kernel by kernel: each is checked against float32 on fresh random inputs, then timed by graph
replay over KV that no cache holds. A table tells what the default choice gives and what would have been best.

    PYTHONPATH=src python bench/cuda/attention.py [--only decode,prefill] [--heads 32] [--kv-heads 8] [--quick]"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from twostroke.backends.cuda.kernels.decode_attention import DecodeScratch, attend_decode
from twostroke.backends.cuda.kernels.decode_cuts import DecodeConfig, SplitPlan, cut_contexts, decode_config, split_plan
from twostroke.backends.cuda.kernels.hopper_prefill import attend_prefill_hopper, unsupported
from twostroke.backends.cuda.kernels.prefill_attention import PrefillConfig, attend_prefill, prefill_config
from twostroke.backends.cuda.kernels.prefill_tiles import PrefillScratch, PrefillTiles, PrefillWork

COLD_BYTES = 256 << 20
"""KV that a timing walks over before it comes back to the same pages: several times the second-level cache."""
STARTED = time.perf_counter()

DECODE_CONFIGS = [
    DecodeConfig(64, 4, 5, True),
    DecodeConfig(32, 2, 5, False),
    DecodeConfig(64, 4, 3, False),
    DecodeConfig(64, 4, 5, False),
    DecodeConfig(64, 4, 3, True),
    DecodeConfig(128, 8, 3, True),
    DecodeConfig(64, 4, 7, True),
    DecodeConfig(32, 2, 7, False),
    DecodeConfig(32, 4, 7, True),
]
PLAIN_CONFIGS = [(128, PrefillConfig(64, 8, 3)), (128, PrefillConfig(128, 8, 2)), (64, PrefillConfig(64, 4, 3))]
HOPPER_CONFIGS = [(128, False), (128, True), (64, False), (64, True)]


@dataclass(frozen=True)
class Model:
    heads: int
    kv_heads: int
    head_dim: int
    page: int
    dtype: torch.dtype
    num_sms: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * 2


class Pool:
    """One layer's KV, and block tables over disjoint pages of it in random order."""

    def __init__(self, model: Model, num_tokens: int) -> None:
        self.model = model
        self.num_blocks = num_tokens // model.page
        shape = (self.num_blocks + 1, model.kv_heads, model.page, model.head_dim)
        self.k = torch.randn(shape, dtype=model.dtype, device="cuda")
        self.v = torch.randn(shape, dtype=model.dtype, device="cuda")

    def tables(self, contexts: Sequence[int]) -> list[torch.Tensor]:
        """As many tables as it takes to walk COLD_BYTES, or as fit."""
        pages = [-(-context // self.model.page) for context in contexts]
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
        blocks = table[row, : position // self.model.page + 1].long()

        def gather(cache: torch.Tensor) -> torch.Tensor:
            return cache[blocks].transpose(1, 2).flatten(0, 1)[: position + 1].float()

        query = query.float().view(self.model.kv_heads, self.model.group, -1)
        scores = torch.einsum("hgd,nhd->hgn", query, gather(self.k)) * self.model.head_dim**-0.5
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


def decode_result(name: str, contexts: list[int], model: Model, pool: Pool, quick: bool) -> Result:
    tokens = len(contexts)
    tables = pool.tables(contexts)
    queries = torch.randn((tokens, model.heads + 2 * model.kv_heads, model.head_dim), dtype=model.dtype, device="cuda")
    queries = queries[:, : model.heads]
    out = torch.empty((tokens, model.heads * model.head_dim), dtype=model.dtype, device="cuda")
    rows = torch.arange(tokens, dtype=torch.int32, device="cuda")
    positions = torch.tensor(contexts, dtype=torch.int32, device="cuda") - 1
    scratch = DecodeScratch(tokens, model.heads, model.kv_heads, model.head_dim, "cuda", model.num_sms)

    def measure(config: DecodeConfig, plan: SplitPlan) -> tuple[float, float]:
        items = scratch.new_items()  # cut once, as a step does for all its layers
        cut_contexts(
            positions, items,
            kv_heads=model.kv_heads, head_dim=model.head_dim, num_sms=model.num_sms, plan=plan, config=config,
        )  # fmt: skip

        def launch(table: torch.Tensor) -> None:
            attend_decode(
                queries, pool.k, pool.v, table, rows, positions, out,
                scale=model.head_dim**-0.5, scratch=scratch, items=items, config=config, plan=plan,
            )  # fmt: skip

        out.fill_(float("nan"))
        launch(tables[0])
        chosen = random.sample(range(tokens), min(4, tokens))
        error = max(relative_error(out[t], pool.reference(tables[0], t, queries[t], contexts[t] - 1)) for t in chosen)
        cycle = [tables[i % len(tables)] for i in range(max(16, len(tables)))]
        return error, graph_seconds([lambda table=table: launch(table) for table in cycle])

    default_config = decode_config(tokens, model.head_dim, model.kv_heads, model.num_sms)
    default_plan = split_plan(tokens, model.kv_heads, model.num_sms)
    choices = {"default": lambda: measure(default_config, default_plan)}
    for config in DECODE_CONFIGS[: 2 if quick else None]:
        for per_sm in (1, 2) if quick else (1, 2, 4):
            for smallest in (32, 128) if max(contexts) * tokens <= 16384 else (128,):
                target = max(1, per_sm * model.num_sms // model.kv_heads)
                plan = SplitPlan(target, smallest, tokens + target)
                label = f"{config.block}/{config.warps}w/{config.stages}s/{'keys' if config.keys_first else 'queries'}"
                choices[f"{label} {per_sm} an SM, from {smallest}"] = lambda c=config, p=plan: measure(c, p)
    return try_each(name, choices, sum(contexts) * model.token_bytes / 1e12, "TB/s")


def prefill_result(name: str, count: int, start: int, model: Model, pool: Pool) -> Result:
    tables = pool.tables([start + count])[:8]
    queries = torch.randn((count, model.heads + 2 * model.kv_heads, model.head_dim), dtype=model.dtype, device="cuda")
    queries = queries[:, : model.heads]
    out = torch.empty((count, model.heads * model.head_dim), dtype=model.dtype, device="cuda")
    scratch = PrefillScratch(model.kv_heads, model.head_dim, "cuda", model.num_sms)

    def measure(tile_rows: int, attend: Callable[..., None], **options: object) -> tuple[float, float]:
        tiles = PrefillTiles.build(
            [0], [count], [start], [0],
            tile_rows=tile_rows, group=model.group, kv_heads=model.kv_heads, num_sms=model.num_sms,
        )  # fmt: skip
        work = PrefillWork.of(tiles, "cuda")

        def launch(table: torch.Tensor) -> None:
            attend(queries, pool.k, pool.v, table, work, out, scale=model.head_dim**-0.5, scratch=scratch, **options)

        out.fill_(float("nan"))
        launch(tables[0])
        chosen = sorted({0, count - 1, *random.sample(range(count), min(14, count))})
        error = max(relative_error(out[i], pool.reference(tables[0], 0, queries[i], start + i)) for i in chosen)
        if not bool(torch.isfinite(out).all()):
            error = float("nan")
        return error, graph_seconds([lambda table=table: launch(table) for table in tables], repeats=5)

    choices = {}
    reason = unsupported(model.head_dim, model.page, model.dtype, torch.cuda.get_device_capability())
    if reason is None:
        for tile_rows, pinned in HOPPER_CONFIGS:
            label = f"Hopper, tile {tile_rows}{', pinned' if pinned else ''}"
            choices[label] = lambda t=tile_rows, p=pinned: measure(t, attend_prefill_hopper, pinned=p)
    else:
        say(f"no Hopper kernel: {reason}")
    choices["plain, its default"] = lambda: measure(128, attend_prefill, config=prefill_config(128, model.head_dim))
    for tile_rows, config in PLAIN_CONFIGS[1:]:
        label = f"plain, tile {tile_rows}, {config.block}/{config.warps}w/{config.stages}s"
        choices[label] = lambda t=tile_rows, c=config: measure(t, attend_prefill, config=c)
    # Two products of two operations each over every pair of a query and a key that it reads.
    pairs = count * start + count * (count + 1) // 2
    return try_each(name, choices, 4 * model.heads * model.head_dim * pairs / 1e12, "TFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--pool-tokens", type=int, default=1 << 20)
    parser.add_argument("--shapes", default="", help="only shapes whose name has one of these, by commas")
    parser.add_argument("--quick", action="store_true", help="fewer decode configurations")
    options = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    model = Model(
        options.heads, options.kv_heads, options.head_dim, options.page,
        getattr(torch, options.dtype), properties.multi_processor_count,
    )  # fmt: skip
    random.seed(1)
    say(f"{properties.name}, torch {torch.__version__}, {model}")
    pool = Pool(model, options.pool_tokens)
    mixed = [random.randint(100, 2000) for _ in range(256)]
    decodes = {
        "decode 1 x 32768": [32768], "decode 8 x 8192": [8192] * 8, "decode 64 x 4096": [4096] * 64,
        "decode 256 x 2048": [2048] * 256, "decode 256 mixed": mixed, "decode 1 x 512": [512],
        "decode 8 x 1024": [1024] * 8, "decode 256 x 900": [900] * 256, "decode 128 x 1150": [1150] * 128,
        "decode 64 x 800": [800] * 64,
    }  # fmt: skip
    prefills = {
        "prefill 8192": (8192, 0), "prefill 32768": (32768, 0), "prefill 8192 + 8192": (8192, 8192),
        "prefill 8192 + 512": (512, 8192), "prefill 8192 + 64": (64, 8192),
    }  # fmt: skip
    if options.shapes:
        parts = options.shapes.split(",")
        decodes = {name: sizes for name, sizes in decodes.items() if any(part in name for part in parts)}
        prefills = {name: sizes for name, sizes in prefills.items() if any(part in name for part in parts)}
    results = []
    if "decode" in options.only:
        results += [decode_result(name, contexts, model, pool, options.quick) for name, contexts in decodes.items()]
    if "prefill" in options.only:
        results += [prefill_result(name, *sizes, model, pool) for name, sizes in prefills.items()]
    print(f"\n{'shape':<22} {'default':>9} {'us':>9} {'best':>9} {'us':>9}  unit     error   best by")
    for r in results:
        print(
            f"{r.name:<22} {r.default:9.2f} {r.default_us:9.1f} {r.best:9.2f} {r.best_us:9.1f}  {r.unit:<7}"
            f"  {r.error:.1e} {r.best_choice}"
        )


if __name__ == "__main__":
    main()
