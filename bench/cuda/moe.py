"""The mixture of experts on the card: checked against float32, then timed by graph replay that walks over several
layers' weights, so that no cache serves them. The floor is the bytes of the chosen experts, or the arithmetic. First
our grouped products, candidate by candidate (`*`: the default), then whole blocks from router to next norm.

    PYTHONPATH=src python bench/cuda/moe.py [--tokens 4,16,64,...] [--layers 4] [--few]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.moe_combine import NextNorm, combine
from twostroke.backends.cuda.kernels.moe_decode import GemvTile, few_tokens_down, few_tokens_gate_up
from twostroke.backends.cuda.kernels.moe_grouped import choose_tile
from twostroke.backends.cuda.kernels.moe_routing import choose_experts, router_logits, sort_by_expert
from twostroke.backends.cuda.kernels.moe_routing import choose_tile as choose_routing_tile
from twostroke.backends.cuda.moe import FEW_TOKENS, MoeBlock, MoeScratch, MoeTiles, MoeWeights, choose_path
from twostroke.models.spec import MoeSpec

if __package__:
    from bench.cuda.moe_products import Products, Tile, compile_all, measure, short
else:
    from moe_products import Products, Tile, compile_all, measure, short

SHAPES = {
    "qwen3-30b-a3b": (2048, MoeSpec(num_experts=128, experts_per_token=8, expert_intermediate_size=768)),
    "mixtral-8x7b": (4096, MoeSpec(num_experts=8, experts_per_token=2, expert_intermediate_size=14336)),
}
STARTED_S = time.perf_counter()
FEW_GATE_UP_TILES = [GemvTile(4, 1024), GemvTile(8, 512), GemvTile(8, 256), GemvTile(16, 512, 8)]
FEW_DOWN_TILES = [GemvTile(4, 1024), GemvTile(2, 1024), GemvTile(4, 256), GemvTile(8, 256)]


@dataclass(frozen=True)
class Bench:
    hidden: int
    moe: MoeSpec
    layers: list[MoeWeights]
    scratch: MoeScratch
    norm_weight: torch.Tensor
    options: argparse.Namespace

    def inputs(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.hidden, device="cuda", dtype=torch.bfloat16)

    @property
    def expert_bytes(self) -> int:
        return 2 * 3 * self.hidden * self.moe.expert_intermediate_size

    def floor_us(self, x: torch.Tensor) -> tuple[float, float, float]:
        """Of one layer, on the average of all: the floor, its bytes, its FLOPs."""
        touched = 0
        for weights in self.layers:
            logits = x.float() @ weights.router.float().T
            touched += len(logits.topk(self.moe.experts_per_token, -1).indices.unique())
        num_bytes = touched / len(self.layers) * self.expert_bytes
        flops = x.shape[0] * self.moe.experts_per_token * self.expert_bytes  # two bytes a weight, two FLOPs a product
        return max(num_bytes / self.options.read_tb_per_s, flops / self.options.tflops) / 1e6, num_bytes, flops

    def is_late(self) -> bool:
        return time.perf_counter() - STARTED_S > self.options.budget_s


def say(*words: object) -> None:
    print(f"[{time.perf_counter() - STARTED_S:6.1f}]", *words, flush=True)


def time_us(work: Callable[[int], object], num_layers: int) -> float:
    """Microseconds of `work` for one layer, over a graph of all layers, replayed back to back."""
    for layer in range(num_layers):
        work(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for layer in range(num_layers):
                work(layer)
    graph.replay()
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(3):
        first.record()
        for _ in range(5):
            graph.replay()
        last.record()
        torch.cuda.synchronize()
        best = min(best, first.elapsed_time(last) * 1e3 / (10 * num_layers))
    return best


def expected(bench: Bench, weights: MoeWeights, x: torch.Tensor) -> torch.Tensor:
    """Expert by expert, in float32 but for the activations, which are kept in bfloat16 between the products."""
    shares, chosen = torch.softmax(x.float() @ weights.router.float().T, -1).topk(bench.moe.experts_per_token, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ weights.gate_up.weight[expert].float().T).chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        out[tokens] += shares[tokens, slots, None] * (inner @ weights.down.weight[expert].float().T)
    return out


def check(bench: Bench) -> None:
    weights = bench.layers[0]
    block = MoeBlock(bench.moe, weights)
    cases = [("few", (1, 5, 16)), ("grouped", (3, 40, 256, 700, 2000))]
    for path, num_tokens in ((path, size) for path, sizes in cases for size in sizes):
        try:
            x = bench.inputs(num_tokens)
            residual = torch.randn_like(x)
            wanted = expected(bench, weights, x) + residual.float()
            normed = torch.nn.functional.rms_norm(wanted, (bench.hidden,), bench.norm_weight.float(), 1e-6)
            found = []
            for _ in range(2):
                out, following = residual.clone(), NextNorm(bench.norm_weight, torch.empty_like(x), 1e-6)
                block.forward(x, out, bench.scratch, residual=out, next_norm=following, path=path)
                found.append(torch.cat([out, following.out]))
            wanted = torch.cat([wanted, normed])
            error = ((found[0].float() - wanted).abs().max() / wanted.abs().max()).item()
            verdict = "ok" if error < 0.02 and torch.equal(*found) else "WRONG"
            say(f"check {path:8s} {num_tokens:5d} tokens: error {error:.1e} of the largest, {verdict}")
        except Exception as failure:
            say(f"check {path} {num_tokens} tokens: FAILED {type(failure).__name__}: {str(failure)[:200]}")


def time_few_parts(bench: Bench, num_tokens: int) -> None:
    """Each of the two kernels alone, over its tiles."""
    x, top_k = bench.inputs(num_tokens), bench.moe.experts_per_token
    out = torch.empty_like(x)
    activations = bench.scratch.activations[: num_tokens * top_k].normal_()
    logits = []
    for weights in bench.layers:
        logits.append(torch.empty(num_tokens, bench.moe.num_experts, device="cuda"))
        router_logits(x, weights.router, logits[-1])
    _, num_bytes, _ = bench.floor_us(x)

    def gate_up(tile: GemvTile) -> Callable[[int], None]:
        return lambda layer: few_tokens_gate_up(
            x, logits[layer], bench.layers[layer].gate_up.weight, activations, top_k=top_k, tile=tile
        )

    def down(tile: GemvTile) -> Callable[[int], None]:
        return lambda layer: few_tokens_down(
            activations, logits[layer], bench.layers[layer].down.weight, out, top_k=top_k, normalise=True, tile=tile
        )

    for name, share, tiles, work in (
        ("gate_up", 2 / 3, FEW_GATE_UP_TILES, gate_up),
        ("down", 1 / 3, FEW_DOWN_TILES, down),
    ):
        for tile in tiles:
            if bench.is_late():
                return
            try:
                us = time_us(work(tile), len(bench.layers))
                rate = num_bytes * share / us / 1e6
                say(f"part {name:8s} {num_tokens:3d} tokens {tile}: {us:.1f} us, {rate:.2f} TB/s")
            except Exception as failure:
                say(f"part {name} {tile}: FAILED {type(failure).__name__}: {str(failure)[:160]}")


def time_products(bench: Bench, products: Products) -> tuple[list[str], MoeTiles]:
    """Lines of the table, and the fastest tiles."""
    lines, best = [], {}
    num_tokens = len(products.x)
    _, num_bytes, flops = bench.floor_us(products.x)
    for gated, name, share in ((True, "gate_up", 2 / 3), (False, "down", 1 / 3)):
        times: dict[Tile, float] = {}
        for index, (tile, us) in enumerate(measure(products, gated, time_us)):
            mark = "*" if index == 0 else " "
            label = f"{num_tokens:6d} {name:8s}{mark}{short(tile):34s}"
            if isinstance(us, str):
                lines.append(f"{label} {us}")
            else:
                times[tile] = us
                rates = f"{share * num_bytes / us / 1e6:5.2f} TB/s {share * flops / us / 1e6:5.0f} TFLOP/s"
                lines.append(f"{label} {us:8.1f} us {rates}")
            say(lines[-1])  # at once: a kernel that hangs is then the one behind the last line
        if times:
            best[gated] = min(times, key=lambda tile: times[tile])
            lines.append(f"{num_tokens:6d} {name:8s} best: {short(best[gated])}, {times[best[gated]]:.1f} us")
            say(lines[-1])
    return lines, MoeTiles(grouped_gate_up=best.get(True), grouped_down=best.get(False))


def time_block(bench: Bench, x: torch.Tensor, path: str | None, tiles: MoeTiles) -> float:
    """From the router's product to the norm after the block, on top of the residual stream."""
    blocks = [MoeBlock(bench.moe, weights) for weights in bench.layers]
    out, following = torch.zeros_like(x), NextNorm(bench.norm_weight, torch.empty_like(x), 1e-6)
    options = {"residual": out, "next_norm": following, "path": path, "tiles": tiles}
    return time_us(lambda layer: blocks[layer].forward(x, out, bench.scratch, **options), len(blocks))


def time_blocks(bench: Bench, x: torch.Tensor, best: MoeTiles) -> list[str]:
    num_tokens = len(x)
    floor_us, num_bytes, flops = bench.floor_us(x)
    chosen = choose_path(num_tokens)
    wanted: list[tuple[str, str, MoeTiles]] = [("grouped", "tiles by default", MoeTiles())]
    num_rows, experts = num_tokens * bench.moe.experts_per_token, bench.moe.num_experts
    plain = MoeTiles(
        grouped_gate_up=choose_tile(num_rows, experts, gated=True),
        grouped_down=choose_tile(num_rows, experts, gated=False),
    )
    wanted.append(("grouped", "plain kernels", plain))
    if num_tokens <= 4 * FEW_TOKENS:
        wanted.append(("few", "", MoeTiles()))
    if best.grouped_gate_up and best.grouped_down:
        wanted.append(("grouped", "best tiles", best))
    lines = []
    for path, name, tiles in wanted:
        mark = "*" if path == chosen and tiles == MoeTiles() else " "
        label = f"{num_tokens:6d}{mark}{path:8s}"
        try:
            us = time_block(bench, x, path, tiles)
            rates = f"{num_bytes / us / 1e6:5.2f} TB/s {flops / us / 1e6:6.0f} TFLOP/s"
            lines.append(f"{label} {us:9.1f} us {rates} {floor_us / us:5.0%} of floor  {name}")
        except Exception as failure:
            lines.append(f"{label} FAILED {type(failure).__name__}: {str(failure)[:120]}  {name}")
        say(lines[-1])
    return lines


def time_small_kernels(bench: Bench, x: torch.Tensor) -> str:
    """Each alone, layer after layer; in a block they overlap a little more."""
    scratch, moe, num_tokens = bench.scratch, bench.moe, len(x)
    num_pairs = num_tokens * moe.experts_per_token
    routing, tile = scratch.routing, choose_routing_tile(num_tokens)
    shares, rows, order = scratch.shares[:num_tokens], scratch.rows[:num_tokens], scratch.sorted_pairs[:num_pairs]
    outputs, out = scratch.expert_outputs[:num_pairs], torch.zeros_like(x)
    following = NextNorm(bench.norm_weight, torch.empty_like(x), 1e-6)
    parts: dict[str, Callable[[int], object]] = {
        "choose": lambda layer: choose_experts(
            x, bench.layers[layer].router, routing, shares, normalise=True, tile=tile
        ),
        "sort": lambda layer: sort_by_expert(routing, scratch.starts, order, rows, tile=tile),
        "combine": lambda layer: combine(outputs, rows, shares, out, residual=out),
        "combine+norm": lambda layer: combine(
            outputs, rows, shares, out, residual=out, next_norm=following
        ),
    }  # fmt: skip
    told = []
    for name, work in parts.items():
        try:
            told.append(f"{name} {time_us(work, len(bench.layers)):.1f}")
        except Exception as failure:
            told.append(f"{name} FAILED {type(failure).__name__}: {str(failure)[:80]}")
    return f"{num_tokens:6d} " + ", ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="16,64,128,192,256,512,1024,2048,8192")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--no-products", dest="products", action="store_false", help="whole blocks alone")
    parser.add_argument("--few", action="store_true", help="the kernels for a few tokens, tile by tile, at one token")
    parser.add_argument("--budget-s", type=float, default=90.0, help="after this, no more products are timed")
    parser.add_argument("--read-tb-per-s", type=float, default=4.27)
    parser.add_argument("--tflops", type=float, default=774.0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this needs a CUDA device")
    hidden, moe = SHAPES[options.shape]
    sizes = [int(size) for size in options.tokens.split(",")]
    torch.manual_seed(0)
    layers = [MoeWeights.empty(moe, hidden, torch.bfloat16, "cuda") for _ in range(options.layers)]
    for weights in layers:
        for tensor in (weights.router, weights.gate_up.weight, weights.down.weight):
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    scratch = MoeScratch(moe, hidden, max(*sizes, 2000), torch.bfloat16, "cuda")
    norm_weight = torch.rand(hidden, device="cuda").bfloat16() + 0.5
    bench = Bench(hidden, moe, layers, scratch, norm_weight, options)
    say(f"{options.shape} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    batches = [bench.inputs(size) for size in sizes]
    if options.products:
        compile_all([Products.of(moe, layers, x, scratch) for x in batches], options.threads, say)
    check(bench)
    products, blocks, small = [], [], []
    for x in batches:
        best = MoeTiles()
        if options.products and not bench.is_late():
            lines, best = time_products(bench, Products.of(moe, layers, x, scratch))
            products += lines
        blocks += time_blocks(bench, x, best)
        small.append(time_small_kernels(bench, x))
    if options.few:
        time_few_parts(bench, 1)
    print("\ntokens product  tile (rows x outputs [x depth])           a layer (* default; t: weights first;")
    print("                H: the Hopper kernel, bulk: rows by TMA too, x2: two programs an SM)")
    print("\n".join(products))
    print("\ntokens small kernels, us a layer")
    print("\n".join(small))
    print("\ntokens path         a layer, router to next norm (* default)")
    print("\n".join(blocks))


if __name__ == "__main__":
    main()
