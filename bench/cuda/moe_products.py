"""The candidates for our grouped matrix products, gate and up apart from down: compiled in threads, checked against
float32, timed. Which numbers of tokens try which is decided by the rows an expert gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from twostroke.backends.cuda.kernels.grouped_tiles import HopperTile
from twostroke.backends.cuda.kernels.moe_grouped import GroupedTile, choose_tile, grouped_matmul, tile_for
from twostroke.backends.cuda.kernels.moe_routing import route
from twostroke.backends.cuda.moe import MoeScratch, MoeWeights
from twostroke.models.spec import MoeSpec

TOLERANCE = 0.01
ROWS_FIRST: dict[str, Any] = {"weights_first": False}
TWO: dict[str, Any] = {"programs_per_sm": 2}
GUESS: dict[str, Any] = {"guesses": True}
IN_BULK: dict[str, Any] = {"rows_in_bulk": True}
Tile = GroupedTile | HopperTile

# Up to 4, 12, 40, 96 rows an expert on average, and more; gate and up first, then down.
FEWEST: tuple[list[Tile], list[Tile]] = (
    [
        HopperTile(8, 64, 12),
        HopperTile(16, 64, 12),
        HopperTile(16, 64, 12, **GUESS),
        HopperTile(16, 64, 6, **TWO),
        HopperTile(32, 64, 11),
        HopperTile(32, 128, 6, 8),
    ],
    [
        HopperTile(8, 128, 12),
        HopperTile(16, 128, 12),
        HopperTile(16, 128, 12, **GUESS),
        HopperTile(16, 128, 6, **TWO),
        HopperTile(16, 128, 12, **IN_BULK),
        HopperTile(32, 128, 10),
        HopperTile(32, 64, 8, **TWO),
    ],
)
FEW: tuple[list[Tile], list[Tile]] = (
    [
        HopperTile(16, 64, 12, **GUESS),
        HopperTile(32, 64, 11),
        HopperTile(32, 64, 11, **GUESS),
        HopperTile(32, 64, 5, **TWO, **GUESS),
        HopperTile(32, 128, 6, 8, **GUESS),
        HopperTile(64, 64, 9, **GUESS),
    ],
    [
        HopperTile(16, 128, 12, **GUESS),
        HopperTile(32, 128, 10),
        HopperTile(32, 128, 10, **GUESS),
        HopperTile(32, 128, 5, **TWO, **GUESS),
        HopperTile(32, 128, 10, **GUESS, **IN_BULK),
        HopperTile(32, 256, 5, 8, **GUESS),
        HopperTile(64, 128, 8, **GUESS),
    ],
)
SOME: tuple[list[Tile], list[Tile]] = (
    [
        HopperTile(32, 64, 11, **GUESS),
        HopperTile(32, 64, 5, **TWO, **GUESS),
        HopperTile(32, 128, 6, 8, **GUESS),
        HopperTile(64, 64, 9, **GUESS),
        HopperTile(64, 64, 4, **TWO, **GUESS),
        HopperTile(64, 128, 5, 8),
        HopperTile(64, 128, 5, 8, **GUESS),
        HopperTile(128, 64, 6, 4, **GUESS),
    ],
    [
        HopperTile(32, 128, 10, **GUESS),
        HopperTile(32, 128, 5, **TWO, **GUESS),
        HopperTile(32, 256, 5, 8, **GUESS),
        HopperTile(64, 128, 8, **GUESS),
        HopperTile(64, 128, 4, **TWO, **GUESS),
        HopperTile(64, 256, 4, 8),
        HopperTile(64, 256, 4, 8, **GUESS),
        HopperTile(64, 256, 4, 8, **GUESS, **IN_BULK),
    ],
)
MEDIUM: tuple[list[Tile], list[Tile]] = (
    [
        HopperTile(64, 128, 5, 8, **GUESS),
        HopperTile(128, 64, 6, 4),
        HopperTile(128, 64, 3, 4, **TWO),
        HopperTile(128, 128, 4, 8),
        HopperTile(128, 128, 4, 8, **GUESS),
        HopperTile(128, 128, 4, 8, **ROWS_FIRST),
    ],
    [
        HopperTile(64, 256, 4, 8, **GUESS),
        HopperTile(128, 128, 5, 4, **IN_BULK),
        HopperTile(128, 128, 3, 4, **IN_BULK, **TWO, pieces=2),
        HopperTile(128, 256, 4, 8, **IN_BULK, pieces=2),
        HopperTile(128, 256, 4, 8, **IN_BULK, **GUESS, pieces=2),
        HopperTile(128, 256, 4, 8, **IN_BULK, **ROWS_FIRST, pieces=2),
    ],
)
MANY: tuple[list[Tile], list[Tile]] = (
    [
        HopperTile(64, 128, 5, 8),
        HopperTile(128, 64, 3, 4, **ROWS_FIRST, **TWO),
        HopperTile(128, 64, 3, 4, **TWO),
        HopperTile(128, 128, 4, 8),
        HopperTile(128, 128, 3, 8, **ROWS_FIRST),
        HopperTile(128, 128, 4, 8, **ROWS_FIRST),
    ],
    [
        HopperTile(64, 256, 4, 8, **IN_BULK),
        HopperTile(128, 128, 3, 4, **ROWS_FIRST, **IN_BULK, **TWO, pieces=2),
        HopperTile(128, 256, 4, 8, **IN_BULK, pieces=2),
        HopperTile(128, 256, 3, 8, **ROWS_FIRST, **IN_BULK),
        HopperTile(128, 256, 4, 8, **ROWS_FIRST, pieces=2),
        HopperTile(128, 256, 4, 8, **ROWS_FIRST, **IN_BULK, pieces=2),
        HopperTile(256, 128, 3, 8, **IN_BULK),
    ],
)
BY_AVERAGE_ROWS = {3: FEWEST, 12: FEW, 40: SOME, 96: MEDIUM, math.inf: MANY}


def short(tile: Tile) -> str:
    if isinstance(tile, HopperTile):
        flags = (
            (tile.weights_first, " t"), (tile.rows_in_bulk, " bulk"), (tile.guesses, " guess"),
            (tile.programs_per_sm > 1, f" x{tile.programs_per_sm}"),
        )  # fmt: skip
        size = f"H {tile.rows}x{tile.outputs} w{tile.num_warps} s{tile.stages}"
        return size + "".join(name for flag, name in flags if flag)
    flags = (tile.weights_first, " t"), (tile.bulk, " bulk")
    size = f"{tile.rows}x{tile.outputs}x{tile.depth} w{tile.num_warps} s{tile.num_stages}"
    return size + "".join(name for flag, name in flags if flag)


def candidates(num_tokens: int, moe: MoeSpec, weights: MoeWeights, gated: bool) -> list[Tile]:
    """The default first, then the plain kernel's."""
    num_rows, matrix = num_tokens * moe.experts_per_token, (weights.gate_up if gated else weights.down).weight
    tried = next(
        tiles[0 if gated else 1] for rows, tiles in BY_AVERAGE_ROWS.items() if num_rows <= rows * moe.num_experts
    )
    plain = choose_tile(num_rows, moe.num_experts, gated=gated)
    return list(dict.fromkeys([tile_for(num_rows, matrix, gated=gated), plain, *tried]))


@dataclass(frozen=True)
class Products:
    """Every layer's order of one batch of tokens, and both products on it."""

    moe: MoeSpec
    layers: list[MoeWeights]
    x: torch.Tensor  # [num_tokens, hidden]
    activations: torch.Tensor  # [num_pairs, intermediate]
    gated_outputs: torch.Tensor  # [num_pairs, intermediate]
    outputs: torch.Tensor  # [num_pairs, hidden]
    orders: list[tuple[torch.Tensor, torch.Tensor]]  # sorted pairs and starts, a layer

    @staticmethod
    def of(moe: MoeSpec, layers: list[MoeWeights], x: torch.Tensor, scratch: MoeScratch) -> Products:
        num_tokens, num_pairs = len(x), len(x) * moe.experts_per_token
        orders = []
        for weights in layers:
            order = scratch.sorted_pairs[:num_pairs].clone(), scratch.starts.clone()
            shares, rows = scratch.shares[:num_tokens], scratch.rows[:num_tokens]
            route(x, weights.router, scratch.routing, shares, order[1], order[0], rows, normalise=True)
            orders.append(order)
        activations = torch.randn_like(scratch.activations[:num_pairs])
        outputs = torch.empty_like(scratch.expert_outputs[:num_pairs])
        return Products(moe, layers, x, activations, torch.empty_like(activations), outputs, orders)

    def call(self, layer: int, tile: Tile, gated: bool) -> torch.Tensor:
        weights = (self.layers[layer].gate_up if gated else self.layers[layer].down).weight
        inputs, results = (self.x, self.gated_outputs) if gated else (self.activations, self.outputs)
        top_k = self.moe.experts_per_token
        grouped_matmul(inputs, weights, results, *self.orders[layer], top_k=top_k, gated=gated, tile=tile)
        return results

    def expected(self, gated: bool) -> torch.Tensor:
        """Of the first layer, expert by expert, in float32."""
        weights, (sorted_pairs, starts) = self.layers[0], self.orders[0]
        tokens, bounds = sorted_pairs.long() // self.moe.experts_per_token, starts.tolist()
        found = []
        for expert in range(self.moe.num_experts):
            own = slice(bounds[expert], bounds[expert + 1])
            if gated:
                gate, up = (self.x[tokens[own]].float() @ weights.gate_up.weight[expert].float().T).chunk(2, -1)
                found.append(torch.nn.functional.silu(gate) * up)
            else:
                found.append(self.activations[own].float() @ weights.down.weight[expert].float().T)
        return torch.cat(found)

    def error(self, tile: Tile, gated: bool, expected: torch.Tensor) -> float:
        self.gated_outputs.fill_(float("nan"))
        self.outputs.fill_(float("nan"))
        return float((self.call(0, tile, gated).float() - expected).norm() / expected.norm())


def compile_all(products: list[Products], threads: int, say: Callable[..., None]) -> None:
    """In threads: the compiler leaves Python's lock for most of its work. A tile's code serves any number of tokens."""
    calls = {
        (t, gated): p
        for p in products
        for gated in (True, False)
        for t in candidates(len(p.x), p.moe, p.layers[0], gated)
    }

    def compile_one(call: tuple[Tile, bool]) -> None:
        torch.cuda.set_device(0)
        try:
            calls[call].call(0, *call)
        except Exception as failure:
            say(f"does not run: {short(call[0])}, gated {call[1]}: {type(failure).__name__}: {str(failure)[:160]}")

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(compile_one, calls))
    torch.cuda.synchronize()
    say(f"compiled {len(calls)} variants")


def measure(
    products: Products, gated: bool, time_us: Callable[[Callable[[int], object], int], float]
) -> Iterator[tuple[Tile, float | str]]:
    """Microseconds a layer of each candidate, the default first, or what is wrong with it."""
    expected = products.expected(gated)
    for tile in candidates(len(products.x), products.moe, products.layers[0], gated):
        try:
            error = products.error(tile, gated, expected)
            if not error < TOLERANCE:
                yield tile, f"WRONG: error {error:.1e}"
                continue

            def work(layer: int, tile: Tile = tile) -> None:
                products.call(layer, tile, gated)

            yield tile, time_us(work, len(products.layers))
        except Exception as failure:
            yield tile, f"FAILED {type(failure).__name__}: {str(failure)[:120]}"
