"""Experts' products with packed weights on the card beside those with bfloat16 ones: each checked against float32
first, and for equal bits when repeated, then timed by replaying a graph over enough layers that L2 serves none.
Dense products are measured by `twostroke tune`.

    PYTHONPATH=src python -m bench.cuda.packed [--experts 16,64,128,256] [--alike 0.2] [--experts-of mixtral-8x7b]"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch

from bench.cuda.attention_cases import graph_seconds
from bench.cuda.moe import SHAPES
from bench.cuda.moe_products import Products, short
from twostroke.backends.cuda.kernels.moe_grouped import tile_for
from twostroke.backends.cuda.kernels.packed_experts import packed_experts_product
from twostroke.backends.cuda.kernels.packed_tiles import FEW_ROWS, PackedTile
from twostroke.backends.cuda.kernels.target import target_of
from twostroke.backends.cuda.matrix import pack
from twostroke.backends.cuda.moe import MoeScratch, MoeWeights
from twostroke.models.spec import MoeSpec

REPEATS = 20
LAYERS = 3
TOLERANCE = 1.0e-2


def described(tile: PackedTile) -> str:
    splits = f", {tile.splits} splits" * (tile.splits > 1)
    shared = " in turns" * tile.shared
    return f"packed: {tile.rows} rows, {tile.groups} groups of {tile.units}{shared}, {tile.held_stages} stages{splits}"


def time_us(calls: list[Callable[[], None]]) -> float:
    """Of one call, when all are made one after another: the median of several replays."""
    return graph_seconds(calls) * 1e6 / len(calls)


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

    @staticmethod
    def random(shape: str) -> Experts:
        hidden, moe = SHAPES[shape]
        layers = [MoeWeights.empty(moe, hidden, torch.bfloat16, "cuda") for _ in range(LAYERS)]
        for layer in layers:
            for weight in (layer.router, layer.gate_up.weight, layer.down.weight):
                weight.normal_(0, 0.02)
            for matrix in (layer.gate_up, layer.down):
                matrix.make_room_for_packed()
        pack(matrix for layer in layers for matrix in (layer.gate_up, layer.down))
        return Experts(moe, hidden, layers)

    def products_of(self, num_tokens: int, alike: float) -> Products:
        """`alike`: the cosine between two tokens. Above 0, some experts are chosen more often than others."""
        own, common = (torch.randn(count, self.hidden, device="cuda") for count in (num_tokens, 1))
        tokens = (sqrt(1 - alike) * own + sqrt(alike) * common).to(torch.bfloat16)
        scratch = MoeScratch(self.moe, self.hidden, num_tokens, torch.bfloat16, "cuda")
        return Products.of(self.moe, self.layers, tokens, scratch)


def measure_experts(experts: Experts, num_tokens: int, alike: float, threads: ThreadPoolExecutor) -> None:
    moe, layers = experts.moe, experts.layers
    products = experts.products_of(num_tokens, alike)
    num_pairs, num_sms = num_tokens * moe.experts_per_token, target_of("cuda").num_sms
    rows = products.orders[0][1].diff()
    print(f"{num_tokens} tokens, {alike} alike: {int((rows > 0).sum())} experts, the largest of {int(rows.max())} rows")
    for gated in (True, False):
        matrices = [layer.gate_up if gated else layer.down for layer in layers]
        name, weights = matrices[0].name, matrices[0].weight
        expected = products.expected(gated)
        chosen = tile_for(num_pairs, weights, gated=gated)
        layer_of = [i % LAYERS for i in range(12)]
        us = time_us([partial(products.call, layer, chosen, gated, True) for layer in layer_of])
        lines = [(us, f"bfloat16: {short(chosen)}")]
        inputs, results = (products.x, products.gated_outputs) if gated else (products.activations, products.outputs)

        def run(layer: int, tile: PackedTile) -> None:
            packed_experts_product(
                inputs, matrices[layer].packed, results, *products.orders[layer],  # noqa: B023
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
    parser.add_argument("--experts", default="16,64,128,256")
    parser.add_argument("--experts-of", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--alike", type=float, default=0.0, help="the cosine between two of the experts' tokens")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    experts = Experts.random(options.experts_of)
    with ThreadPoolExecutor(12) as threads:
        for num_tokens in map(int, options.experts.split(",")):
            measure_experts(experts, num_tokens, options.alike, threads)


if __name__ == "__main__":
    main()
