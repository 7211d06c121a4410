"""The routing of a mixture of experts on the card, from the router's product to the sorted order: checked against
torch, then timed by graph replay, tile by tile (`*`: the default). Warm: the router and the code are in L2. Cold: as
after a layer's experts, which push them out.

    PYTHONPATH=src python bench/cuda/moe_routing.py [--tokens 16,64,...] [--repetitions 20] [--budget-s 50]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.moe_routing import Order, RoutingScratch, RoutingTile, choose_tile, route

STARTED_S = time.perf_counter()
FEW_TILES = [
    RoutingTile(16, 8, 256, num_stages=2),
    RoutingTile(16, 8, 128, num_warps=8),
    RoutingTile(16, 8, 64, num_stages=5),
    RoutingTile(16, 4, 128),
    RoutingTile(16, 2, 128),
    RoutingTile(16, 1, 64, num_stages=6),
]
MANY_TILES = [
    RoutingTile(64, 4, 128),
    RoutingTile(64, 2, 128, num_warps=8),
    RoutingTile(64, 1, 64, num_stages=4),
    RoutingTile(64, 1, 64, num_stages=6),
    RoutingTile(64, 1, 64, num_warps=8, num_stages=6),
    RoutingTile(32, 2, 128),
    RoutingTile(32, 1, 64, num_stages=6),
    RoutingTile(16, 1, 64, num_stages=6),
]


@dataclass(frozen=True)
class Batch:
    """One step's tokens, the routers of several layers, and all that routing writes."""

    x: torch.Tensor  # [num_tokens, hidden]
    routers: list[torch.Tensor]  # [experts, hidden], a layer
    top_k: int
    scratch: RoutingScratch
    shares: torch.Tensor
    starts: torch.Tensor
    sorted_pairs: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(x: torch.Tensor, routers: list[torch.Tensor], top_k: int) -> Batch:
        num_tokens, num_experts = len(x), len(routers[0])

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=x.device)

        shares = torch.zeros(num_tokens, top_k, device=x.device)
        pairs = integers(num_tokens * top_k)
        order = (integers(num_experts + 1), pairs, integers(num_tokens, top_k))
        scratch = RoutingScratch(num_experts, num_tokens, x.device)
        return Batch(x, routers, top_k, scratch, shares, *order)

    def run(self, layer: int, tile: RoutingTile) -> None:
        order = Order(self.sorted_pairs, self.starts, self.top_k)
        route(self.x, self.routers[layer], self.scratch, self.shares, order, self.rows, normalise=True, tile=tile)

    def found(self, work: Callable[[], None]) -> list[torch.Tensor]:
        results = [self.shares, self.starts, self.sorted_pairs, self.rows]
        for result in results:
            result.fill_(-7)
        work()
        return [result.clone() for result in results]


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED_S:6.1f}]", *words, flush=True)


def short(tile: RoutingTile) -> str:
    return f"{tile.tokens} tokens, {tile.parts} parts, {tile.depth} deep, {tile.num_warps}w {tile.num_stages}s"


def tiles_for(num_tokens: int) -> list[RoutingTile]:
    """The default first."""
    others = FEW_TILES if num_tokens <= 1024 else MANY_TILES
    fitting = [tile for tile in others if tile.parts == 1 or -(-num_tokens // tile.tokens) * tile.parts <= 128]
    return list(dict.fromkeys([choose_tile(num_tokens), *fitting]))


def expected(batch: Batch) -> list[torch.Tensor]:
    """In the same order as `Batch.found`."""
    logits = batch.x.float() @ batch.routers[0].float().T
    chosen = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, : batch.top_k]
    shares = torch.softmax(logits.gather(-1, chosen), -1)
    sorted_pairs = torch.sort(chosen.flatten(), stable=True).indices
    counts = torch.bincount(chosen.flatten(), minlength=logits.shape[1])
    starts = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0))
    return [shares, starts, sorted_pairs, torch.argsort(sorted_pairs).view_as(chosen)]


def check(batch: Batch, tile: RoutingTile) -> str:
    """On whole numbers, whose products are exact, so that equals abound and nothing may differ but a share's rounding;
    on others, but for near-equals, which rounding may swap."""
    whole = Batch.of(torch.randint_like(batch.x, -1, 2), [torch.randint_like(batch.routers[0], -1, 2)], batch.top_k)
    wanted = expected(whole)
    found = whole.found(lambda: whole.run(0, tile))
    if (found[0] - wanted[0]).abs().max() > 1e-5:
        return "WRONG shares"
    for name, ours, theirs in zip(("starts", "sorted_pairs", "rows"), found[1:], wanted[1:], strict=True):
        if not torch.equal(ours.long(), theirs):
            return f"WRONG {name}"
    again = [batch.found(lambda: batch.run(0, tile)) for _ in range(3)]
    if not all(torch.equal(a, b) for other in again[1:] for a, b in zip(again[0], other, strict=True)):
        return "WRONG: not the same every time"
    differing = (again[0][0] - expected(batch)[0]).abs().amax(1) > 1e-4
    return "ok" if differing.float().mean() < 0.01 else f"WRONG: {int(differing.sum())} tokens unlike torch's"


def time_us(work: Callable[[int], object], repetitions: int, between: Callable[[], object] | None = None) -> float:
    """Microseconds of `work`, and of what is done `between`, on the average of a replayed graph."""
    work(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(repetitions):
            if between is not None:
                between()
            work(layer)
    graph.replay()
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(5):
        first.record()
        for _ in range(3):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        best = min(best, first.elapsed_time(last) * 1e3 / (3 * repetitions))
    return best


def time_both(work: Callable[[int], object], repetitions: int, flush: Callable[[], object], flush_us: float) -> str:
    warm = time_us(work, repetitions)
    cold = time_us(work, repetitions, flush) - flush_us
    return f"{warm:7.1f} warm {cold:7.1f} cold"


def compile_all(batches: list[Batch], threads: int) -> None:
    """In threads: the compiler leaves Python's lock for most of its work."""
    calls = {tile: batch for batch in batches for tile in tiles_for(len(batch.x))}

    def compile_one(tile: RoutingTile) -> None:
        torch.cuda.set_device(0)
        try:
            calls[tile].run(0, tile)
        except Exception as failure:
            say(f"does not run: {short(tile)}: {type(failure).__name__}: {str(failure)[:160]}")

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(compile_one, calls))
    torch.cuda.synchronize()
    say(f"compiled {len(calls)} variants")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="16,64,128,256,2048,8192")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--threads", type=int, default=12)
    parser.add_argument("--budget-s", type=float, default=50.0, help="after this, the defaults alone are timed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device")
    torch.manual_seed(0)
    repetitions = options.repetitions
    kinds = {"device": "cuda", "dtype": torch.bfloat16}
    routers = [torch.randn(options.experts, options.hidden, **kinds) * options.hidden**-0.5 for _ in range(repetitions)]
    sizes = [int(size) for size in options.tokens.split(",")]
    batches = [Batch.of(torch.randn(size, options.hidden, **kinds), routers, options.top_k) for size in sizes]
    pushed = torch.zeros(2, 64 << 20, dtype=torch.uint8, device="cuda")
    say(f"routing on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    compile_all(batches, options.threads)

    def flush() -> None:
        pushed[1].copy_(pushed[0])

    flush_us = time_us(lambda _: None, repetitions, flush)
    lines = []
    for batch in batches:
        num_tokens, tiles = len(batch.x), tiles_for(len(batch.x))
        for tile in tiles if time.perf_counter() - STARTED_S < options.budget_s else tiles[:1]:
            mark = "*" if tile == tiles[0] else " "
            label = f"{num_tokens:6d}{mark}{short(tile):42s}"

            def work(layer: int, tile: RoutingTile = tile, batch: Batch = batch) -> None:
                batch.run(layer, tile)

            try:
                verdict = check(batch, tile)
                lines.append(f"{label} {time_both(work, repetitions, flush, flush_us)}  {verdict}")
            except Exception as failure:
                lines.append(f"{label} FAILED {type(failure).__name__}: {str(failure)[:120]}")
            say(lines[-1])
    print("\ntokens routing (* default)                           us a layer, router to sorted order")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
