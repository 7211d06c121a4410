"""The candidates for our grouped matrix products, gate and up apart from down: compiled in threads, checked against
float32, timed. Which numbers of tokens try which is decided by the rows an expert gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.moe_grouped import GroupedTile, choose_tile, grouped_matmul
from twostroke.backends.cuda.kernels.moe_routing import route
from twostroke.backends.cuda.moe import MoeScratch, MoeWeights
from twostroke.models.spec import MoeSpec

TOLERANCE = 0.01
WEIGHTS_FIRST, BULK = {"weights_first": True}, {"weights_first": True, "bulk": True}

SMALL_GATE_UP = [
    GroupedTile(16, 64, 64, 4, 5, **WEIGHTS_FIRST),
    GroupedTile(16, 64, 64, 4, 5, **BULK),
    GroupedTile(16, 64, 64, 4, 4, **BULK),
    GroupedTile(16, 64, 64, 4, 6, **BULK),
    GroupedTile(16, 64, 128, 4, 3, **BULK),
    GroupedTile(16, 128, 64, 4, 3, **BULK),
    GroupedTile(32, 64, 64, 4, 5, **BULK),
]
MEDIUM_GATE_UP = [
    GroupedTile(16, 64, 64, 4, 5, **WEIGHTS_FIRST),
    GroupedTile(16, 64, 64, 4, 5, **BULK),
    GroupedTile(32, 64, 64, 4, 5, **WEIGHTS_FIRST),
    GroupedTile(32, 64, 64, 4, 5, **BULK),
    GroupedTile(32, 64, 64, 4, 3, **BULK),
    GroupedTile(32, 64, 128, 4, 3, **WEIGHTS_FIRST),
    GroupedTile(32, 128, 64, 4, 3, **BULK),
    GroupedTile(32, 128, 64, 8, 5, **BULK),
    GroupedTile(16, 64, 128, 4, 3, **BULK),
    GroupedTile(64, 128, 64, 8, 5, **BULK),
    GroupedTile(128, 128, 64, 8, 4, bulk=True),
]
LARGE_GATE_UP = [
    GroupedTile(64, 128, 64, 8, 4),
    GroupedTile(64, 128, 64, 8, 4, bulk=True),
    GroupedTile(128, 64, 64, 4, 4, bulk=True),
    GroupedTile(128, 128, 64, 8, 3),
    GroupedTile(128, 128, 64, 8, 3, bulk=True),
    GroupedTile(128, 128, 64, 8, 4, bulk=True),
    GroupedTile(128, 128, 64, 8, 4, **BULK),
]
SMALL_DOWN = [
    GroupedTile(16, 128, 64, 4, 5, **WEIGHTS_FIRST),
    GroupedTile(16, 128, 64, 4, 5, **BULK),
    GroupedTile(16, 128, 64, 4, 4, **BULK),
    GroupedTile(16, 64, 128, 4, 5, **BULK),
    GroupedTile(16, 128, 128, 4, 3, **BULK),
    GroupedTile(32, 128, 64, 4, 5, **BULK),
]
MEDIUM_DOWN = [
    GroupedTile(16, 128, 64, 4, 5, **WEIGHTS_FIRST),
    GroupedTile(16, 128, 64, 4, 5, **BULK),
    GroupedTile(32, 128, 64, 4, 5, **WEIGHTS_FIRST),
    GroupedTile(32, 128, 64, 4, 5, **BULK),
    GroupedTile(32, 128, 64, 4, 3, **BULK),
    GroupedTile(32, 64, 128, 4, 3, **WEIGHTS_FIRST),
    GroupedTile(32, 256, 64, 8, 5, **BULK),
    GroupedTile(16, 128, 128, 4, 3, **BULK),
    GroupedTile(64, 128, 64, 4, 4, **BULK),
    GroupedTile(64, 256, 64, 8, 5, **BULK),
    GroupedTile(128, 256, 64, 8, 4, bulk=True),
]
LARGE_DOWN = [
    GroupedTile(64, 256, 64, 8, 3),
    GroupedTile(128, 128, 64, 4, 4, bulk=True),
    GroupedTile(128, 128, 64, 8, 4, bulk=True),
    GroupedTile(128, 256, 64, 8, 3),
    GroupedTile(128, 256, 64, 8, 3, bulk=True),
    GroupedTile(128, 256, 64, 8, 4, bulk=True),
    GroupedTile(128, 256, 64, 8, 4, **BULK),
]


def short(tile: GroupedTile) -> str:
    flags = (tile.weights_first, " t"), (tile.bulk, " bulk")
    size = f"{tile.rows}x{tile.outputs}x{tile.depth} w{tile.num_warps} s{tile.num_stages}"
    return size + "".join(name for flag, name in flags if flag)


def candidates(num_tokens: int, moe: MoeSpec, gated: bool) -> list[GroupedTile]:
    """The default first."""
    num_rows = num_tokens * moe.experts_per_token
    average = num_rows / moe.num_experts
    small, medium, large = (
        (SMALL_GATE_UP, MEDIUM_GATE_UP, LARGE_GATE_UP) if gated else (SMALL_DOWN, MEDIUM_DOWN, LARGE_DOWN)
    )
    tried = small if average < 12 else medium if average < 96 else large
    return list(dict.fromkeys([choose_tile(num_rows, moe.num_experts, gated=gated), *tried]))


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

    def call(self, layer: int, tile: GroupedTile, gated: bool, pdl: bool) -> torch.Tensor:
        weights = self.layers[layer].gate_up if gated else self.layers[layer].down
        inputs, results = (self.x, self.gated_outputs) if gated else (self.activations, self.outputs)
        top_k = self.moe.experts_per_token
        grouped_matmul(inputs, weights, results, *self.orders[layer], top_k=top_k, gated=gated, tile=tile, pdl=pdl)
        return results

    def expected(self, gated: bool) -> torch.Tensor:
        """Of the first layer, expert by expert, in float32."""
        weights, (sorted_pairs, starts) = self.layers[0], self.orders[0]
        tokens, bounds = sorted_pairs.long() // self.moe.experts_per_token, starts.tolist()
        found = []
        for expert in range(self.moe.num_experts):
            own = slice(bounds[expert], bounds[expert + 1])
            if gated:
                gate, up = (self.x[tokens[own]].float() @ weights.gate_up[expert].float().T).chunk(2, -1)
                found.append(torch.nn.functional.silu(gate) * up)
            else:
                found.append(self.activations[own].float() @ weights.down[expert].float().T)
        return torch.cat(found)

    def error(self, tile: GroupedTile, gated: bool, pdl: bool, expected: torch.Tensor) -> float:
        self.gated_outputs.fill_(float("nan"))
        self.outputs.fill_(float("nan"))
        return float((self.call(0, tile, gated, pdl).float() - expected).norm() / expected.norm())


def compile_all(products: list[Products], pdl: bool, threads: int, say: Callable[..., None]) -> None:
    """In threads: the compiler leaves Python's lock for most of its work. A tile's code serves any number of tokens."""
    calls = {(t, gated): p for p in products for gated in (True, False) for t in candidates(len(p.x), p.moe, gated)}

    def compile_one(call: tuple[GroupedTile, bool]) -> None:
        torch.cuda.set_device(0)
        try:
            calls[call].call(0, *call, pdl)
        except Exception as failure:
            say(f"does not run: {short(call[0])}, gated {call[1]}: {type(failure).__name__}: {str(failure)[:160]}")

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(compile_one, calls))
    torch.cuda.synchronize()
    say(f"compiled {len(calls)} variants")


def measure(
    products: Products, gated: bool, pdl: bool, time_us: Callable[[Callable[[int], object], int], float]
) -> Iterator[tuple[GroupedTile, float | str]]:
    """Microseconds a layer of each candidate, the default first, or what is wrong with it."""
    expected = products.expected(gated)
    for tile in candidates(len(products.x), products.moe, gated):
        try:
            error = products.error(tile, gated, pdl, expected)
            if not error < TOLERANCE:
                yield tile, f"WRONG: error {error:.1e}"
                continue

            def work(layer: int, tile: GroupedTile = tile) -> None:
                products.call(layer, tile, gated, pdl)

            yield tile, time_us(work, len(products.layers))
        except Exception as failure:
            yield tile, f"FAILED {type(failure).__name__}: {str(failure)[:120]}"
