"""Products on the card: ours for Hopper beside cuBLAS, each checked against float32 first. Of up to some 2,000 rows:
timed by replaying a graph over enough copies of the weights that L2 serves none. Of a prompt's thousands (--long):
under sustained load, in turns, since the card's power decides.

    PYTHONPATH=src python -m bench.cuda.hopper_products [--rows 16,64,128,192,256,512] [--models llama-3.1-8b]
        [--only gate_up] [--best 3] [--long 2048,8192]"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from bench.cuda.product_cases import MODELS, AnyTile, Matrix, candidates, multiply, time_us
from twostroke.backends.cuda.kernels.activation import Activation, gated
from twostroke.backends.cuda.kernels.cluster_tiles import ClusterTile, choose_cluster_tile
from twostroke.backends.cuda.kernels.product_tiles import ProductTile, choose_tile
from twostroke.backends.cuda.kernels.target import target_of

BUFFER_ROWS = 768
"""A product's rows are the first of a buffer of a multiple of these, as in a model there are rows behind them, whole
tiles of 128, 192 and 256: the copy engine takes longer to fill in zeros."""
PASS_BYTES = 400 * 2**20
TOLERANCE = 1.0e-2
REPEATS = 40
"""A product is computed so often, and must be the same to the bit: a race between copies and products would show."""


class Case:
    """One matrix and some rows to multiply, with as many copies of the matrix as L2 does not hold."""

    def __init__(self, matrix: Matrix, rows: int) -> None:
        copies = max(2, min(24, -(-PASS_BYTES // matrix.num_bytes)))
        shape = (matrix.outputs * (2 if matrix.is_gated else 1), matrix.width)
        self.matrix, self.rows = matrix, rows
        self.kind: Activation | None = "silu" if matrix.is_gated else None
        self.weights = [torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02 for _ in range(copies)]
        self.repeats = max(1, 24 // copies)
        held_rows = -(-rows // BUFFER_ROWS) * BUFFER_ROWS
        self.x = torch.randn(held_rows, matrix.width, dtype=torch.bfloat16, device="cuda")[:rows]
        self.wide = torch.empty(rows, shape[0], dtype=torch.bfloat16, device="cuda")
        self.narrow = torch.empty(rows, matrix.outputs, dtype=torch.bfloat16, device="cuda")
        self.reference = self.x.float() @ self.weights[0].float().t()
        if matrix.is_gated:
            gate, up = self.reference.chunk(2, dim=1)
            self.reference = torch.nn.functional.silu(gate) * up

    def cublas(self, weight: torch.Tensor) -> None:
        torch.mm(self.x, weight.t(), out=self.wide)
        if self.matrix.is_gated:
            gated(self.wide, self.narrow, kind="silu")

    def default_tile(self) -> AnyTile | None:
        matrix = self.matrix
        shape = (self.rows, matrix.outputs, matrix.width, target_of("cuda").num_sms)
        options = {"gated": matrix.is_gated, "may_split": matrix.may_split}
        return choose_cluster_tile(*shape, **options) or choose_tile(*shape, **options)

    def new_out(self, tile: AnyTile) -> torch.Tensor:
        shape: tuple[int, ...] = (self.rows, self.matrix.outputs)
        is_split = tile.is_split if isinstance(tile, ClusterTile) else tile.splits > 1
        parts = tile.parts if isinstance(tile, ClusterTile) else tile.splits
        if parts > 1:
            shape = (parts, *shape)
        kind = torch.float32 if is_split or self.matrix.name == "head" else torch.bfloat16
        return torch.empty(shape, dtype=kind, device="cuda")

    def compile(self, tile: AnyTile) -> None:
        with contextlib.suppress(Exception):  # what is wrong with it, its check will say
            multiply(self.x, self.weights[0], self.new_out(tile), tile, self.kind)

    def fault(self, tile: AnyTile) -> str | None:
        """What is wrong with the product by this tile, or None."""
        try:
            first = None
            for repeat in range(REPEATS):
                out = self.new_out(tile).fill_(float("nan"))
                multiply(self.x, self.weights[0], out, tile, self.kind)
                total = out.sum(0) if out.dim() == 3 else out.float()
                error = ((total - self.reference).norm() / self.reference.norm()).item()
                if not error < TOLERANCE:
                    return f"error {error:.4f} in round {repeat}, {total.isnan().sum().item()} not written"
                first = total if first is None else first
                if not torch.equal(total, first):
                    return f"not the same in round {repeat}"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None

    def cublas_us(self) -> float:
        return time_us([lambda w=w: self.cublas(w) for w in self.weights * self.repeats])

    def tile_us(self, tile: AnyTile) -> float:
        out = self.new_out(tile)
        weights = self.weights * self.repeats
        return time_us([lambda w=w: multiply(self.x, w, out, tile, self.kind) for w in weights])


def name_of(tile: AnyTile) -> str:
    name = f"{tile.outputs} outputs, {tile.stages} stages, "
    if isinstance(tile, ProductTile):
        blocks = f", {tile.row_blocks} blocks of rows" * (tile.row_blocks > 1)
        return name + f"{tile.splits} splits, {tile.num_warps} warps{blocks}"
    name += f"{tile.groups} groups of {tile.row_blocks}, cluster of {tile.cluster}" + ", split" * tile.is_split
    return name + f", {tile.parts} parts" * (tile.parts > 1)


def measure(matrix: Matrix, rows: int, threads: ThreadPoolExecutor, best: int) -> None:
    case = Case(matrix, rows)
    lines = [(case.cublas_us(), "cuBLAS")]
    by_default, tiles = case.default_tile(), candidates(matrix, rows)
    if by_default is not None:
        tiles = list(dict.fromkeys([*tiles, by_default]))
    list(threads.map(case.compile, tiles))
    torch.cuda.synchronize()
    for tile in tiles:
        fault = case.fault(tile)
        if fault is None:
            lines.append((case.tile_us(tile), name_of(tile) + (" (default)" if tile == by_default else "")))
        else:
            print(f"  {tile}: {fault}", flush=True)
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
        ways[str(tile)] = lambda w, tile=tile: multiply(x, w, narrow, tile, kind)
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
