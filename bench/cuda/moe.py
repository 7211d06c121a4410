"""The mixture of experts on the card: checked against float32, then timed by graph replay that walks over several
layers' weights, so that no cache serves them. The floor is the bytes of the chosen experts, or the arithmetic.

    PYTHONPATH=src python bench/cuda/moe.py [--tokens 1,4,16,64,256,2048,8192] [--layers 4] [--no-pdl] [--budget-s S]"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.moe_decode import GemvTile, few_tokens_down, few_tokens_gate_up
from twostroke.backends.cuda.kernels.moe_grouped import GroupedTile, choose_tile
from twostroke.backends.cuda.kernels.moe_routing import router_logits
from twostroke.backends.cuda.moe import MoeBlock, MoeScratch, MoeTiles, MoeWeights
from twostroke.models.spec import MoeSpec

SHAPES = {
    "qwen3-30b-a3b": (2048, MoeSpec(num_experts=128, experts_per_token=8, expert_intermediate_size=768)),
    "mixtral-8x7b": (4096, MoeSpec(num_experts=8, experts_per_token=2, expert_intermediate_size=14336)),
}
STARTED_S = time.perf_counter()

GATE_UP_TILES = [GemvTile(8, 1024), GemvTile(4, 1024), GemvTile(8, 512), GemvTile(8, 256), GemvTile(16, 512, 8)]
DOWN_TILES = [GemvTile(4, 1024), GemvTile(2, 1024), GemvTile(4, 256), GemvTile(8, 256), GemvTile(8, 1024, 8)]
# Gate and up in one program, and down: of as many rows.
SMALL_TILES = [
    (GroupedTile(16, 64, 128, 4, 3, True), GroupedTile(16, 64, 128, 4, 3, True)),
    (GroupedTile(16, 64, 64, 4, 5, True), GroupedTile(16, 128, 64, 4, 5, True)),
    (GroupedTile(16, 32, 128, 4, 3), GroupedTile(16, 64, 128, 4, 3)),
    (GroupedTile(16, 64, 128, 4, 4, True), GroupedTile(16, 64, 256, 4, 3, True)),
    (GroupedTile(32, 64, 128, 4, 3, True), GroupedTile(32, 64, 128, 4, 3, True)),
]
LARGE_TILES = [
    (GroupedTile(64, 64, 64, 4, 4), GroupedTile(64, 128, 64, 4, 4)),
    (GroupedTile(64, 128, 64, 8, 4), GroupedTile(64, 256, 64, 8, 3)),
    (GroupedTile(128, 128, 64, 8, 3), GroupedTile(128, 256, 64, 8, 3)),
    (GroupedTile(128, 128, 64, 8, 4), GroupedTile(128, 128, 64, 8, 4)),
    (GroupedTile(128, 64, 64, 8, 4), GroupedTile(128, 128, 64, 8, 4)),
]


@dataclass(frozen=True)
class Bench:
    hidden: int
    moe: MoeSpec
    layers: list[MoeWeights]
    scratch: MoeScratch
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


def time_us(work: Callable[[int], None], num_layers: int) -> float:
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
        gate, up = (x[tokens].float() @ weights.gate_up[expert].float().T).chunk(2, -1)
        inner = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        out[tokens] += shares[tokens, slots, None] * (inner @ weights.down[expert].float().T)
    return out


def check(bench: Bench, pdl: bool) -> None:
    weights = bench.layers[0]
    block = MoeBlock(bench.moe, weights)
    for path, num_tokens in (("few", 1), ("few", 5), ("few", 16), ("grouped", 3), ("grouped", 40), ("grouped", 700)):
        try:
            x = bench.inputs(num_tokens)
            residual = torch.randn_like(x)
            out, again = residual.clone(), residual.clone()
            for target in (out, again):
                block.forward(x, target, bench.scratch, residual=target, pdl=pdl, path=path)
            wanted = expected(bench, weights, x) + residual.float()
            error = ((out.float() - wanted).abs().max() / wanted.abs().max()).item()
            verdict = "ok" if error < 0.02 and torch.equal(out, again) else "WRONG"
            say(f"check {path:8s} {num_tokens:5d} tokens, pdl {pdl}: error {error:.1e} of the largest, {verdict}")
        except Exception as failure:
            say(f"check {path} {num_tokens} tokens, pdl {pdl}: FAILED {type(failure).__name__}: {str(failure)[:200]}")


def time_few_parts(bench: Bench, num_tokens: int) -> None:
    """Each of the two kernels alone, over its tiles."""
    x, top_k, pdl = bench.inputs(num_tokens), bench.moe.experts_per_token, bench.options.pdl
    out = torch.empty_like(x)
    activations = bench.scratch.activations[: num_tokens * top_k].normal_()
    logits = []
    for weights in bench.layers:
        logits.append(torch.empty(num_tokens, bench.moe.num_experts, device="cuda"))
        router_logits(x, weights.router, logits[-1])
    _, num_bytes, _ = bench.floor_us(x)

    def gate_up(tile: GemvTile) -> Callable[[int], None]:
        return lambda layer: few_tokens_gate_up(
            x, logits[layer], bench.layers[layer].gate_up, activations, top_k=top_k, tile=tile, pdl=pdl
        )

    def down(tile: GemvTile) -> Callable[[int], None]:
        return lambda layer: few_tokens_down(
            activations, logits[layer], bench.layers[layer].down, out, top_k=top_k, normalise=True, tile=tile, pdl=pdl
        )

    for name, share, tiles, work in (
        ("gate_up", 2 / 3, GATE_UP_TILES, gate_up),
        ("down", 1 / 3, DOWN_TILES, down),
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


def time_block(bench: Bench, x: torch.Tensor, path: str, tiles: MoeTiles) -> float:
    blocks = [MoeBlock(bench.moe, weights) for weights in bench.layers]
    out = torch.empty_like(x)
    pdl = bench.options.pdl
    return time_us(
        lambda layer: blocks[layer].forward(x, out, bench.scratch, pdl=pdl, path=path, tiles=tiles), len(blocks)
    )


def time_torch(bench: Bench, x: torch.Tensor) -> float:
    """torch's grouped products alone, of rows that are sorted already."""
    moe, num_rows = bench.moe, x.shape[0] * bench.moe.experts_per_token
    ends = torch.linspace(0, num_rows, moe.num_experts + 1, device="cuda")[1:].int()
    rows = bench.inputs(num_rows)
    inner = bench.scratch.activations[:num_rows]

    def products(layer: int) -> None:
        weights = bench.layers[layer]
        torch._grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends)
        torch._grouped_mm(inner, weights.down.transpose(1, 2), offs=ends)

    return time_us(products, len(bench.layers))


def candidates(bench: Bench, num_tokens: int) -> list[tuple[str, str, MoeTiles]]:
    """(path, name, tiles), the default of each path first."""
    found: list[tuple[str, str, MoeTiles]] = []
    if num_tokens <= 16:
        found.append(("few", "default", MoeTiles()))
    found.append(("grouped", "default", MoeTiles()))
    num_rows = num_tokens * bench.moe.experts_per_token
    default = tuple(choose_tile(num_rows, bench.moe.num_experts, gated=gated) for gated in (True, False))
    for pair in SMALL_TILES if num_rows / bench.moe.num_experts <= 40 else LARGE_TILES:
        if pair != default:
            name = " | ".join(
                f"{t.rows}x{t.outputs}x{t.depth} w{t.num_warps} s{t.num_stages}{' t' if t.weights_first else ''}"
                for t in pair
            )
            found.append(("grouped", name, MoeTiles(grouped_gate_up=pair[0], grouped_down=pair[1])))
    return found


def time_blocks(bench: Bench, num_tokens: int) -> list[str]:
    x = bench.inputs(num_tokens)
    floor_us, num_bytes, flops = bench.floor_us(x)
    lines = []
    for path, name, tiles in candidates(bench, num_tokens):
        if bench.is_late() and name != "default":
            continue
        try:
            us = time_block(bench, x, path, tiles)
            rate = f"{num_bytes / us / 1e6:5.2f} TB/s {flops / us / 1e6:6.0f} TFLOP/s"
            lines.append(f"{num_tokens:6d} {path:8s} {us:9.1f} us {rate} {floor_us / us:5.0%} of floor  {name}")
        except Exception as failure:
            lines.append(f"{num_tokens:6d} {path:8s} FAILED {type(failure).__name__}: {str(failure)[:120]}  {name}")
        say(lines[-1])
    if num_tokens >= 2048:
        try:
            lines.append(f"{num_tokens:6d} {'torch':8s} {time_torch(bench, x):9.1f} us, its grouped products alone")
            say(lines[-1])
        except Exception as failure:
            say(f"torch's grouped products: {type(failure).__name__}: {str(failure)[:120]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="1,4,16,64,256,2048,8192")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--no-pdl", dest="pdl", action="store_false")
    parser.add_argument("--budget-s", type=float, default=100.0, help="after this, only default tiles are timed")
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
        for tensor in (weights.router, weights.gate_up, weights.down):
            tensor.normal_(0, tensor.shape[-1] ** -0.5)
    scratch = MoeScratch(moe, hidden, max(*sizes, 700), torch.bfloat16, "cuda")
    bench = Bench(hidden, moe, layers, scratch, options)
    say(f"{options.shape} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for pdl in (False, True) if options.pdl else (False,):
        check(bench, pdl)
    lines = [line for num_tokens in sizes for line in time_blocks(bench, num_tokens)]
    time_few_parts(bench, min(sizes))
    print("\ntokens path         a layer                                  of floor  tiles (gate and up | down)")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
