"""Products of some dozens of rows on the card: ours for Hopper beside cuBLAS, each checked against float32 first, then
timed by replaying a graph over enough copies of the weights that L2 serves none.

PYTHONPATH=src python bench/cuda/hopper_products.py [--rows 16,64,128] [--models llama-3.1-8b] [--best 3]"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.activation import gated
from twostroke.backends.cuda.kernels.hopper_products import product
from twostroke.backends.cuda.kernels.product_tiles import DEPTH, MAX_ROWS, ProductTile, choose_tile
from twostroke.backends.cuda.kernels.target import target_of

SHARED_BYTES = 225 * 1024
PASS_BYTES = 400 * 2**20
TOLERANCE = 1.0e-2
REPEATS = 40
"""A product is computed so often, and must be the same to the bit: a race between copies and products would show."""


@dataclass(frozen=True)
class Matrix:
    name: str
    outputs: int
    width: int
    is_gated: bool = False

    @property
    def num_bytes(self) -> int:
        return 2 * self.outputs * self.width * (2 if self.is_gated else 1)


def matrices(hidden: int, attention: int, qkv: int, intermediate: int, vocabulary: int) -> list[Matrix]:
    return [
        Matrix("qkv", qkv, hidden),
        Matrix("o", hidden, attention),
        Matrix("gate_up", intermediate, hidden, is_gated=True),
        Matrix("down", hidden, intermediate),
        Matrix("head", vocabulary, hidden),
    ]


MODELS = {
    "llama-3.1-8b": matrices(4096, 4096, 6144, 14336, 128256),
    "qwen3-0.6b": matrices(1024, 2048, 4096, 3072, 151936),
    "qwen3-30b-a3b": [Matrix("qkv", 5120, 2048), Matrix("o", 2048, 4096), Matrix("head", 151936, 2048)],
}


def candidates(matrix: Matrix, rows: int) -> list[ProductTile]:
    """Every cut worth a try; two programs an SM where both fit."""
    found = []
    for outputs in (64, 128) if matrix.is_gated else (64, 128, 256):
        for num_warps in (4, 8):
            values = outputs * (2 if matrix.is_gated else 1) * max(rows, 64) // (num_warps * 32)
            if values > 128:
                continue
            for splits in (1,) if matrix.is_gated or matrix.name == "head" else (1, 2, 4, 7, 8):
                programs = -(-matrix.outputs // outputs) * splits
                rounds = matrix.width // DEPTH // splits
                if rounds * splits * DEPTH != matrix.width or programs < 40 or (splits > 1 and programs > 300):
                    continue
                for programs_of_sm in (1, 2):
                    one = ProductTile(outputs, 1, num_warps, splits).shared_bytes(rows, gated=matrix.is_gated)
                    stages = min(SHARED_BYTES // programs_of_sm // one, rounds, 8)
                    if stages >= 3:
                        found.append(ProductTile(outputs, stages, num_warps, splits))
    return list(dict.fromkeys(found))


def time_us(calls: list[Callable[[], None]]) -> float:
    """Of one call, when all are made one after another: the median of several replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[3]


def measure(matrix: Matrix, rows: int, threads: ThreadPoolExecutor, best: int) -> None:
    copies = max(2, min(24, -(-PASS_BYTES // matrix.num_bytes)))
    factor = 2 if matrix.is_gated else 1
    weights = [
        torch.randn(factor * matrix.outputs, matrix.width, dtype=torch.bfloat16, device="cuda") * 0.02
        for _ in range(copies)
    ]
    x = torch.randn(MAX_ROWS, matrix.width, dtype=torch.bfloat16, device="cuda")[:rows]  # as of a model's buffer
    wide = torch.empty(rows, factor * matrix.outputs, dtype=torch.bfloat16, device="cuda")
    reference = (x.float() @ weights[0].float().t()).clone()
    narrow = torch.empty(rows, matrix.outputs, dtype=torch.bfloat16, device="cuda")
    if matrix.is_gated:
        gate, up = reference.chunk(2, dim=1)
        reference = torch.nn.functional.silu(gate) * up

    def cublas(weight: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=wide)
        if matrix.is_gated:
            gated(wide, narrow, kind="silu")

    repeats = max(1, 24 // copies)
    lines = [(time_us([lambda w=w: cublas(w) for w in weights * repeats]), "cuBLAS")]
    by_default = choose_tile(
        rows, matrix.outputs, matrix.width, target_of("cuda").num_sms,
        gated=matrix.is_gated, may_split=matrix.name in ("o", "down"),
    )  # fmt: skip
    tiles = candidates(matrix, rows)
    if by_default is not None:
        tiles = list(dict.fromkeys([*tiles, by_default]))

    def out_of(tile: ProductTile) -> torch.Tensor:
        if tile.splits > 1:
            return torch.empty(tile.splits, rows, matrix.outputs, dtype=torch.float32, device="cuda")
        kind = torch.float32 if matrix.name == "head" else torch.bfloat16
        return torch.empty(rows, matrix.outputs, dtype=kind, device="cuda")

    kind = "silu" if matrix.is_gated else None

    def compile_it(tile: ProductTile) -> None:
        with contextlib.suppress(Exception):  # what is wrong with it, its check will say
            product(x, weights[0], out_of(tile), tile=tile, gated=kind, pdl=True)

    def check(tile: ProductTile) -> str | None:
        try:
            first = None
            for repeat in range(REPEATS):
                out = out_of(tile).fill_(float("nan"))
                product(x, weights[0], out, tile=tile, gated=kind, pdl=repeat % 2 == 0)
                total = out.sum(0) if tile.splits > 1 else out.float()
                error = ((total - reference).norm() / reference.norm()).item()
                if not error < TOLERANCE:
                    return f"error {error:.4f} in round {repeat}, {total.isnan().sum().item()} not written"
                first = total if first is None else first
                if not torch.equal(total, first):
                    return f"not the same in round {repeat}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None

    list(threads.map(compile_it, tiles))
    torch.cuda.synchronize()
    for tile in tiles:
        wrong = check(tile)
        if wrong is not None:
            print(f"  {tile}: {wrong}", flush=True)
            continue
        out = out_of(tile)
        calls = [lambda w=w: product(x, w, out, tile=tile, gated=kind, pdl=True) for w in weights * repeats]  # noqa: B023
        name = f"{tile.outputs} outputs, {tile.splits} splits, {tile.stages} stages, {tile.num_warps} warps"
        name += " (default)" if tile == by_default else ""
        lines.append((time_us(calls), name))
    ranked = sorted(lines[1:])
    shown = [lines[0], *ranked[:best], *(line for line in ranked[best:] if line[1].endswith("(default)"))]
    for each_us, name in shown:
        rate = matrix.num_bytes / each_us / 1e6
        print(f"{rows:4d} {matrix.name:8s} {each_us:8.2f} us {rate:6.2f} TB/s  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="16,64,96,128")
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--only", default="", help="names of matrices")
    parser.add_argument("--best", type=int, default=3)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with ThreadPoolExecutor(12) as threads:
        for model in options.models.split(","):
            print(f"== {model}")
            for matrix in MODELS[model]:
                if options.only and matrix.name not in options.only.split(","):
                    continue
                for rows in map(int, options.rows.split(",")):
                    measure(matrix, rows, threads, options.best)


if __name__ == "__main__":
    main()
