"""Products on the card: ours for Hopper beside cuBLAS, each checked against float32 first. Of up to 256 rows: timed by
replaying a graph over enough copies of the weights that L2 serves none. Of a prompt's thousands (--long): under
sustained load, in turns, since the card's power decides.

PYTHONPATH=src python bench/cuda/hopper_products.py [--rows 16,64,128,192,256] [--models llama-3.1-8b] [--best 3]
    [--long 2048,8192]"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.activation import Activation, gated
from twostroke.backends.cuda.kernels.cluster_products import cluster_product
from twostroke.backends.cuda.kernels.cluster_tiles import ClusterTile, choose_cluster_tile
from twostroke.backends.cuda.kernels.hopper_products import product
from twostroke.backends.cuda.kernels.product_tiles import DEPTH, MAX_ROWS, SHARED_BYTES, ProductTile, choose_tile
from twostroke.backends.cuda.kernels.target import target_of

MOST_ROWS = 512
"""Rows of the buffer that a product's rows are the first of, as in a model."""
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
    def may_split(self) -> bool:
        """Whether who reads the result adds up parts."""
        return self.name in ("qkv", "o", "down")

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


AnyTile = ProductTile | ClusterTile


def multiply(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, tile: AnyTile, kind: Activation | None, *, pdl: bool
) -> None:
    if isinstance(tile, ClusterTile):
        cluster_product(x, weight, out, tile=tile, num_sms=target_of("cuda").num_sms, gated=kind, pdl=pdl)
    else:
        product(x, weight, out, tile=tile, gated=kind, pdl=pdl)


def cluster_candidates(matrix: Matrix, rows: int) -> list[AnyTile]:
    """Those that keep nearly all of 132 multiprocessors busy."""
    found: list[AnyTile] = []
    shapes = ((1, 2),) if rows <= 128 else ((1, 3),) if rows <= 192 else ((2, 2), (1, 4))
    widths = (112, 128, 192, 224, 256) if matrix.is_gated else (64, 80, 96, 128, 192, 256)
    for row_blocks, groups in shapes:
        for outputs in widths:
            if outputs * row_blocks > 256:
                continue
            columns = outputs // 2 if matrix.is_gated else outputs
            blocks = -(-matrix.outputs // columns)
            for splits in (2, 4) if matrix.may_split else (1,):
                programs = blocks * splits
                if programs / 132 / -(-programs // 132) < 0.8 or (splits > 1 and programs > 132):
                    continue
                if matrix.width % (DEPTH * splits):
                    continue
                if splits > 1:
                    found.append(ClusterTile(outputs, row_blocks, groups, splits, is_split=True))
                else:
                    found += [ClusterTile(outputs, row_blocks, groups, cluster) for cluster in (1, 2)]
    return found


def candidates(matrix: Matrix, rows: int) -> list[AnyTile]:
    """Every cut worth a try; two programs an SM where both fit."""
    found = cluster_candidates(matrix, rows) if rows > 64 else []
    if rows > MAX_ROWS:
        return found
    for outputs in (64, 128) if matrix.is_gated else (64, 128, 256):
        for num_warps in (4, 8):
            values = outputs * (2 if matrix.is_gated else 1) * max(rows, 64) // (num_warps * 32)
            if values > 128:
                continue
            for splits in (1, 2, 4, 7, 8) if matrix.may_split else (1,):
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
    stream.wait_stream(torch.cuda.current_stream())
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
    x = torch.randn(MOST_ROWS, matrix.width, dtype=torch.bfloat16, device="cuda")[:rows]  # as of a model's buffer
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
    shape = (rows, matrix.outputs, matrix.width, target_of("cuda").num_sms)
    options = {"gated": matrix.is_gated, "may_split": matrix.may_split}
    by_default = choose_cluster_tile(*shape, **options) or choose_tile(*shape, **options)
    tiles = candidates(matrix, rows)
    if by_default is not None:
        tiles = list(dict.fromkeys([*tiles, by_default]))

    def out_of(tile: AnyTile) -> torch.Tensor:
        if isinstance(tile, ClusterTile) and tile.is_split:
            return torch.empty(rows, matrix.outputs, dtype=torch.float32, device="cuda")
        if isinstance(tile, ProductTile) and tile.splits > 1:
            return torch.empty(tile.splits, rows, matrix.outputs, dtype=torch.float32, device="cuda")
        kind = torch.float32 if matrix.name == "head" else torch.bfloat16
        return torch.empty(rows, matrix.outputs, dtype=kind, device="cuda")

    kind = "silu" if matrix.is_gated else None

    def compile_it(tile: AnyTile) -> None:
        with contextlib.suppress(Exception):  # what is wrong with it, its check will say
            multiply(x, weights[0], out_of(tile), tile, kind, pdl=True)

    def check(tile: AnyTile) -> str | None:
        try:
            first = None
            for repeat in range(REPEATS):
                out = out_of(tile).fill_(float("nan"))
                multiply(x, weights[0], out, tile, kind, pdl=repeat % 2 == 0)
                total = out.sum(0) if out.dim() == 3 else out.float()
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
        calls = [lambda w=w: multiply(x, w, out, tile, kind, pdl=True) for w in weights * repeats]  # noqa: B023
        name = f"{tile.outputs} outputs, {tile.stages} stages, "
        if isinstance(tile, ClusterTile):
            name += f"{tile.groups} groups of {tile.row_blocks}, cluster of {tile.cluster}" + ", split" * tile.is_split
        else:
            name += f"{tile.splits} splits, {tile.num_warps} warps"
        name += " (default)" if tile == by_default else ""
        lines.append((time_us(calls), name))
    ranked = sorted(lines[1:])
    shown = [lines[0], *ranked[:best], *(line for line in ranked[best:] if line[1].endswith("(default)"))]
    for each_us, name in shown:
        rate = matrix.num_bytes / each_us / 1e6
        flops = matrix.num_bytes * rows / each_us / 1e6
        print(f"{rows:4d} {matrix.name:8s} {each_us:8.2f} us {rate:6.2f} TB/s {flops:4.0f} TFLOP/s  {name}", flush=True)


def measure_long(matrix: Matrix, rows: int) -> None:
    """A gate of a prompt: by cuBLAS and a kernel behind it, by one kernel of ours."""
    factor = 2 if matrix.is_gated else 1
    shape = (factor * matrix.outputs, matrix.width)
    weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(2)]
    x = torch.randn(rows, matrix.width, dtype=torch.bfloat16, device="cuda")
    wide = torch.empty(rows, factor * matrix.outputs, dtype=torch.bfloat16, device="cuda")
    narrow = torch.empty(rows, matrix.outputs, dtype=torch.bfloat16, device="cuda")
    kind: Activation | None = "silu" if matrix.is_gated else None

    def cublas(weight: torch.Tensor) -> None:
        torch.mm(x, weight.t(), out=wide)
        if matrix.is_gated:
            gated(wide, narrow, kind="silu")

    ways: dict[str, Callable[[torch.Tensor], None]] = {"cuBLAS": cublas}
    for outputs, row_blocks, cluster in ((128, 2, 2), (256, 1, 2), (192, 2, 2), (128, 2, 1)):
        tile = ClusterTile(outputs, row_blocks, 2, cluster)
        ways[str(tile)] = lambda w, tile=tile: multiply(x, w, narrow, tile, kind, pdl=False)
    cublas(weights[0])
    reference = (narrow if matrix.is_gated else wide).clone().float()
    times: dict[str, list[float]] = {}
    for turn in range(4):
        for name, way in list(ways.items()):
            try:
                narrow.fill_(float("nan"))
                way(weights[0])
                error = 0.0 if name == "cuBLAS" else ((narrow.float() - reference).norm() / reference.norm()).item()
                if not error < TOLERANCE:
                    raise ValueError(f"error {error}")
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                started_s, count = time.perf_counter(), 0
                begin.record()
                while time.perf_counter() - started_s < 0.3:
                    for weight in weights * 4:
                        way(weight)
                    count += 8
                    torch.cuda.synchronize()
                end.record()
                torch.cuda.synchronize()
                if turn:
                    times.setdefault(name, []).append(begin.elapsed_time(end) * 1e3 / count)
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                del ways[name]
    for name, found in times.items():
        each_us = sorted(found)[len(found) // 2]
        rate = matrix.num_bytes * rows / each_us / 1e6
        print(f"{rows:5d} {matrix.name:8s} {each_us:8.1f} us {rate:6.0f} TFLOP/s  {name}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="16,64,96,128")
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--only", default="", help="names of matrices")
    parser.add_argument("--best", type=int, default=3)
    parser.add_argument("--long", default="", help="rows of prompts")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with ThreadPoolExecutor(12) as threads:
        for model in options.models.split(","):
            print(f"== {model}")
            for matrix in MODELS[model]:
                if options.only and matrix.name not in options.only.split(","):
                    continue
                for rows in map(int, filter(None, options.rows.split(","))):
                    measure(matrix, rows, threads, options.best)
                for rows in map(int, filter(None, options.long.split(","))):
                    if matrix.name != "head":
                        measure_long(matrix, rows)


if __name__ == "__main__":
    main()
