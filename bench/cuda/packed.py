"""Products with packed weights on the card beside those with bfloat16 ones: each checked against float32 first, and for
equal bits when repeated, then timed by replaying a graph over enough copies of the weights that L2 serves none.

    PYTHONPATH=src python -m bench.cuda.packed [--dense 8,32,64,128] [--experts 16,64,128,256] [--alike 0.2]
    [--experts-of mixtral-8x7b] [--models llama-3.1-8b]"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch

from bench.cuda.hopper_products import TOLERANCE, Case, name_of
from bench.cuda.moe import SHAPES
from bench.cuda.moe_products import Products, short
from bench.cuda.product_cases import MODELS, Matrix, time_us
from twostroke.backends.cuda.kernels.moe_grouped import tile_for
from twostroke.backends.cuda.kernels.packed_experts import packed_experts_product
from twostroke.backends.cuda.kernels.packed_format import UNIT_ROWS
from twostroke.backends.cuda.kernels.packed_products import packed_product
from twostroke.backends.cuda.kernels.packed_tiles import DENSE_ROWS, FEW_ROWS, MOST_SUMS, PackedTile
from twostroke.backends.cuda.kernels.packed_weights import PackedMatrix, pack
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.moe import MoeScratch, MoeWeights
from twostroke.models.spec import MoeSpec

REPEATS = 20
LAYERS = 3
MOST_ROWS = {2: MOST_SUMS, 3: 192, 4: 128}
"""Rows times a group's units that registers hold the sums of, by groups."""
CUTS = (
    (2, 1, False),
    (3, 1, False),
    (4, 1, False),
    (2, 2, False),
    (2, 1, True),
    (3, 1, True),
    (4, 1, True),
    (2, 2, True),
)
"""Groups, units of each, whether they share them."""


def packed_copy(weight: torch.Tensor, *, is_gated: bool) -> PackedMatrix:
    place = PackedMatrix.empty(tuple(weight.shape), weight.device, is_gated=is_gated)
    pack(weight, place)
    return place


def described(tile: PackedTile) -> str:
    splits = f", {tile.splits} splits" * (tile.splits > 1)
    shared = " in turns" * tile.shared
    return f"packed: {tile.rows} rows, {tile.groups} groups of {tile.units}{shared}, {tile.held_stages} stages{splits}"


def dense_tiles(matrix: Matrix, rows: int) -> Iterator[PackedTile]:
    """Those that keep most of 132 multiprocessors busy."""
    units = -(-matrix.outputs * (2 if matrix.is_gated else 1) // UNIT_ROWS)
    held = next(size for size in DENSE_ROWS if rows <= size)
    for groups, per_group, shared in CUTS:
        if held > FEW_ROWS and held * per_group > MOST_ROWS[groups]:
            continue
        for splits in (1, 2, 4, 8) if matrix.may_split else (1,):
            tile = PackedTile(held, groups, per_group, splits=splits, shared=shared)
            tiles = -(-units // tile.tile_units) * splits
            is_busy = tiles / 132 / -(-tiles // 132) >= 0.6 and (splits == 1 or tiles <= 140)
            turns = 2 * groups if shared else 2
            if (
                is_busy
                and matrix.width % (64 * splits * turns) == 0
                and not (shared and tiles > 132)
                and tile.held_stages >= 3
            ):
                yield tile


def measure_dense(matrix: Matrix, rows: int, threads: ThreadPoolExecutor) -> None:
    case, num_sms = Case(matrix, rows), target_of("cuda").num_sms
    lines = []
    if (by_default := case.default_tile()) is not None:
        lines.append((case.tile_us(by_default), name_of(by_default)))
    lines.append((case.cublas_us(), "cuBLAS"))
    packed = [packed_copy(weight, is_gated=matrix.is_gated) for weight in case.weights]

    def out_of(tile: PackedTile) -> torch.Tensor:
        shape = (rows, matrix.outputs) if tile.splits == 1 else (tile.splits, rows, matrix.outputs)
        kind = torch.float32 if tile.splits > 1 or matrix.name == "head" else torch.bfloat16
        return torch.full(shape, float("nan"), dtype=kind, device="cuda")

    def run(tile: PackedTile, weight: PackedMatrix, out: torch.Tensor) -> None:
        packed_product(case.x, weight, out, tile=tile, num_sms=num_sms, gated=case.kind)

    tiles = list(dense_tiles(matrix, rows))
    compile_tiles(tiles, lambda tile: run(tile, packed[0], out_of(tile)), threads)
    for tile in tiles:
        try:
            first = None
            for repeat in range(REPEATS):
                out = out_of(tile)
                run(tile, packed[0], out)
                total = out.sum(0) if out.dim() == 3 else out.float()
                error = float((total - case.reference).norm() / case.reference.norm())
                first = total if first is None else first
                if not error < TOLERANCE or not torch.equal(total, first):
                    raise ValueError(f"error {error:.4f} in round {repeat}, {int(total.isnan().sum())} not written")
            out, weights = out_of(tile), packed * case.repeats
            each_us = time_us([lambda w=w, t=tile, o=out: run(t, w, o) for w in weights])
            lines.append((each_us, described(tile)))
        except Exception as failure:
            print(f"  {tile}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)
    for each_us, name in [*lines[:2], *sorted(lines[2:])[:3]]:
        rate = matrix.num_bytes / each_us / 1e6
        print(f"{rows:4d} {matrix.name:8s} {each_us:8.2f} us {rate:6.2f} TB/s of bfloat16  {name}", flush=True)


def compile_tiles(tiles: list[PackedTile], run: Callable[..., None], threads: ThreadPoolExecutor) -> None:
    """Beside each other."""

    def compile_one(tile: PackedTile) -> None:
        try:
            torch.cuda.set_device(0)
            run(tile)
        except Exception as failure:
            print(f"  {tile}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)

    list(threads.map(compile_one, tiles))
    torch.cuda.synchronize()


def experts_tiles(average_rows: float) -> Iterator[PackedTile]:
    """From the average on, until most experts' rows have room."""
    for rows in range(8, FEW_ROWS + 1, 8):
        if average_rows <= rows <= max(32, 2.5 * average_rows):
            for groups, units in ((3, 1), (4, 1), (2, 2)):
                yield PackedTile(rows, groups, units)


@dataclass(frozen=True)
class Experts:
    """Of a few layers."""

    moe: MoeSpec
    hidden: int
    layers: list[MoeWeights]
    packed: list[dict[bool, PackedMatrix]]
    """By whether they are gates."""

    @staticmethod
    def random(shape: str) -> Experts:
        hidden, moe = SHAPES[shape]
        layers = [MoeWeights.empty(moe, hidden, torch.bfloat16, "cuda") for _ in range(LAYERS)]
        for layer in layers:
            for matrix in (layer.router, layer.gate_up, layer.down):
                matrix.normal_(0, 0.02)
        packed = [
            {True: packed_copy(layer.gate_up, is_gated=True), False: packed_copy(layer.down, is_gated=False)}
            for layer in layers
        ]
        return Experts(moe, hidden, layers, packed)

    def products_of(self, num_tokens: int, alike: float) -> Products:
        """`alike`: the cosine between two tokens. Above 0, some experts are chosen more often than others."""
        own, common = (torch.randn(count, self.hidden, device="cuda") for count in (num_tokens, 1))
        tokens = (sqrt(1 - alike) * own + sqrt(alike) * common).to(torch.bfloat16)
        scratch = MoeScratch(self.moe, self.hidden, num_tokens, torch.bfloat16, "cuda")
        return Products.of(self.moe, self.layers, tokens, scratch)


def measure_experts(experts: Experts, num_tokens: int, alike: float, threads: ThreadPoolExecutor) -> None:
    moe, layers, packed = experts.moe, experts.layers, experts.packed
    products = experts.products_of(num_tokens, alike)
    num_pairs, num_sms = num_tokens * moe.experts_per_token, target_of("cuda").num_sms
    rows = products.orders[0][1].diff()
    print(f"{num_tokens} tokens, {alike} alike: {int((rows > 0).sum())} experts, the largest of {int(rows.max())} rows")
    for gated in (True, False):
        name, weights = ("gate_up", layers[0].gate_up) if gated else ("down", layers[0].down)
        expected = products.expected(gated)
        chosen = tile_for(num_pairs, weights, gated=gated)
        layer_of = [i % LAYERS for i in range(12)]
        us = time_us([partial(products.call, layer, chosen, gated, True) for layer in layer_of])
        lines = [(us, f"bfloat16: {short(chosen)}")]
        inputs, results = (products.x, products.gated_outputs) if gated else (products.activations, products.outputs)

        def run(layer: int, tile: PackedTile) -> None:
            packed_experts_product(
                inputs, packed[layer][gated], results, *products.orders[layer],  # noqa: B023
                top_k=moe.experts_per_token, tile=tile, num_sms=num_sms, gated="silu" if gated else None,  # noqa: B023
            )  # fmt: skip

        tiles = list(experts_tiles(num_pairs / moe.num_experts))
        compile_tiles(tiles, partial(run, 0), threads)
        for tile in tiles:
            try:
                first = None
                for repeat in range(REPEATS):
                    results.fill_(float("nan"))
                    run(0, tile)
                    error = float((results.float() - expected).norm() / expected.norm())
                    first = results.clone() if first is None else first
                    if not error < TOLERANCE or not torch.equal(results, first):
                        raise ValueError(f"error {error:.4f} in round {repeat}, {int(results.isnan().sum())} left")
                us = time_us([partial(run, layer, tile) for layer in layer_of])
                lines.append((us, described(tile)))
            except Exception as failure:
                print(f"  {tile}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)
        num_bytes = 2 * weights[0].numel() * int((rows > 0).sum())
        for each_us, label in [lines[0], *sorted(lines[1:])[:4]]:
            rate = num_bytes / each_us / 1e6
            print(f"{num_tokens:4d} {name:8s} {each_us:8.2f} us {rate:6.2f} TB/s of bfloat16  {label}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dense", default="8,32,64,128")
    parser.add_argument("--experts", default="16,64,128,256")
    parser.add_argument("--experts-of", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--alike", type=float, default=0.0, help="the cosine between two of the experts' tokens")
    parser.add_argument("--models", default="llama-3.1-8b")
    parser.add_argument("--names", default="qkv,o,gate_up,down")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with ThreadPoolExecutor(12) as threads:
        if options.experts:
            experts = Experts.random(options.experts_of)
            for num_tokens in map(int, options.experts.split(",")):
                measure_experts(experts, num_tokens, options.alike, threads)
            del experts
        for model in options.models.split(","):
            for rows in map(int, options.dense.split(",")) if options.dense else ():
                for matrix in MODELS[model]:
                    if matrix.name in options.names.split(","):
                        measure_dense(matrix, rows, threads)


if __name__ == "__main__":
    main()
