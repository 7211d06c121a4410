"""What each kind of kernel costs a decode step where it stands, in time and energy: the step's graph is captured again
without it, and with other configurations and cuts of attention, and all are replayed in turns. A profiler cannot say:
kernels of a chain start before the one ahead has ended, and it counts their waiting. Random weights of a config.json;
contexts spread as in `nano`.

    PYTHONPATH=src:. python -m bench.cuda.marginal FOLDER [--steps 256x690,160x910,94x1100,48x1350] [--only WORDS]"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.cuda.energy import EnergyMeter
from twostroke.backends.cuda import attention, model, moe, parts, products
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.decode import DecodePath
from twostroke.backends.cuda.kernels import decode_attention, decode_cuts
from twostroke.backends.cuda.kernels.cluster_tiles import ClusterTile
from twostroke.backends.cuda.kernels.decode_cuts import DecodeConfig
from twostroke.backends.cuda.kernels.product_tiles import MAX_ROWS, ProductTile
from twostroke.backends.cuda.parts import PLAIN
from twostroke.config import EngineConfig
from twostroke.engine.build import build

REPLAYS = 10
ATTENTION = (
    DecodeConfig(64, 2, 5, keys_first=False, ahead=1),
    DecodeConfig(32, 2, 5, keys_first=False, ahead=1),
    DecodeConfig(64, 4, 5, keys_first=True, ahead=1),
    DecodeConfig(64, 4, 5, keys_first=False, ahead=1),
)
PROGRAMS_PER_SM = (None, 2, 3, 6, 9, 12)
"""That few streams are cut into; None: as they are by default."""


CHOOSE, CHOOSE_FEW = products.choose_cluster_tile, products.choose_tile


def in_one_part(*shape: int, **options: bool) -> ClusterTile | None:
    tile = CHOOSE(*shape, **options)
    return ClusterTile(64, tile.row_blocks, tile.groups, is_split=True) if tile and tile.parts > 1 else tile


def four_groups(*shape: int, **options: bool) -> ClusterTile | None:
    tile = CHOOSE(*shape, **options)
    return replace(tile, row_blocks=1, groups=4) if tile is not None and tile.row_blocks == 2 else tile


def not_split(*shape: int, **options: bool) -> ClusterTile | None:
    return CHOOSE(*shape, **{**options, "may_split": False})


def no_blocks_of_rows(rows: int, *shape: int, **options: bool) -> ProductTile | None:
    return CHOOSE_FEW(rows, *shape, **options) if rows <= MAX_ROWS else None


CUTS = {"down in one part": in_one_part, "four warp groups": four_groups, "cuBLAS for o, down": not_split}
"""Other cuts of the products of 129 to 256 rows."""
CUBLAS_FOR_QKV = "cuBLAS for qkv"
LONG_ITEMS = {
    "cuts of no items for their length": (0, 0),
    **{
        f"cuts of items longer than {tokens} into {number} an SM": (tokens, number)
        for tokens, number in ((1920, 3), (1920, 6), (1920, 12))
    },
}


def nothing(*_: object, **__: object) -> None: ...


class Variants:
    """Ways to capture a step, by name: each patches what it leaves out or changes."""

    def __init__(self, backend: CudaBackend) -> None:
        self._parts = backend._parts
        decoder = self._parts.decoder
        weights = decoder._weights
        self._kind_of: dict[int, str] = {}
        for layer in weights.layers:
            self._kind_of[layer.qkv.data_ptr()], self._kind_of[layer.o.data_ptr()] = "qkv", "o"
            if hasattr(layer.mlp, "router"):
                self._kind_of[layer.mlp.gate_up.data_ptr()] = "experts gate"
                self._kind_of[layer.mlp.down.data_ptr()] = "experts down"
            else:
                self._kind_of[layer.mlp.gate_up.data_ptr()] = "gate"
                self._kind_of[layer.mlp.down.data_ptr()] = "down"
        self.is_moe = decoder._spec.moe is not None
        self.num_left_out = 0
        """Kernels of the last variant. None: what it would leave out is joined with the residual by cuBLAS."""

    def names(self) -> list[str]:
        kinds = ["norms", "rope", "attention", "qkv", "o", "norms, rope", "head", "sampling", "cuts"]
        kinds += ["routing", "experts gate", "experts down", "combine"] if self.is_moe else ["gate", "down"]
        changes = [*(label(*each) for each in product(ATTENTION, PROGRAMS_PER_SM)), *LONG_ITEMS, *CUTS, CUBLAS_FOR_QKV]
        return ["whole", *(f"without {kind}" for kind in kinds), *changes]

    @contextmanager
    def apply(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for config, number in product(ATTENTION, PROGRAMS_PER_SM):
                if name == label(config, number):
                    for module in (decode_attention, decode_cuts):
                        stack.enter_context(patch.object(module, "decode_config", lambda *_, chosen=config: chosen))
                    if number is not None:
                        stack.enter_context(patch.object(decode_cuts, "PROGRAMS_PER_SM", number))
                        stack.enter_context(patch.object(decode_cuts, "ITEMS_OF_FEW", 0.0))
                        stack.enter_context(patch.object(decode_cuts, "LONG_ITEM_TOKENS", 0))
            if name in LONG_ITEMS:
                tokens, number = LONG_ITEMS[name]
                stack.enter_context(patch.object(decode_cuts, "LONG_ITEM_TOKENS", tokens))
                stack.enter_context(patch.object(decode_cuts, "PROGRAMS_PER_SM_OF_LONG", number))
            if name == CUBLAS_FOR_QKV:
                stack.enter_context(patch.object(products, "choose_tile", no_blocks_of_rows))
            if name in CUTS:
                stack.enter_context(patch.object(products, "choose_cluster_tile", CUTS[name]))
            self.num_left_out = 0
            if name.startswith("without "):
                for kind in name.removeprefix("without ").split(", "):
                    self._leave_out(kind, stack)
            yield

    def _leave_out(self, kind: str, stack: ExitStack) -> None:
        def drop(owner: Any, *names: str) -> None:
            for each in names:
                stack.enter_context(patch.object(owner, each, nothing))

        if kind == "norms":
            drop(products, "rms_norm", "add_rms_norm", "sandwich")
            drop(model, "rms_norm")
        elif kind == "rope":
            drop(model, "rope_and_store")
        elif kind == "attention":
            drop(attention, "attend_decode")
        elif kind == "cuts":
            drop(attention, "cut_contexts")
        elif kind == "head":
            drop(model.Decoder, "logits")
        elif kind == "sampling":
            drop(parts.Parts, "sample")
        elif kind == "routing":
            drop(moe.moe_routing, "route")
        elif kind == "combine":
            drop(moe.moe_combine, "combine")
        else:
            if "experts" in kind:
                self._leave_out_products(moe.moe_grouped, "grouped_matmul", kind, stack)
            else:
                self._leave_out_products(products.Products, "_multiply", kind, stack)
                self._leave_out_products(products.Products, "plain", kind, stack)  # by cuBLAS, perhaps
            return
        self.num_left_out += 1

    def _leave_out_products(self, owner: Any, name: str, kind: str, stack: ExitStack) -> None:
        inner = getattr(owner, name)

        def some(*arguments: Any, **options: Any) -> None:
            tensors = (argument for argument in arguments if isinstance(argument, torch.Tensor))
            if any(self._kind_of.get(tensor.data_ptr()) == kind for tensor in tensors):
                self.num_left_out += 1
            else:
                inner(*arguments, **options)

        stack.enter_context(patch.object(owner, name, some))


def label(config: DecodeConfig, programs_per_sm: int | None) -> str:
    shape = f"{config.block}/{config.warps}w/{config.stages}s{'/keys' if config.keys_first else ''}"
    return f"attention {shape}, {'own cuts' if programs_per_sm is None else f'{programs_per_sm} an SM'}"


def set_contexts(backend: CudaBackend, rows: int, mean: int, spread: float) -> None:
    """Contexts evenly spread, in an order of no meaning, over blocks in an order of no meaning. Keys, values and tokens
    are random: zeros would take less power, and so less time."""
    own = backend._parts
    own.rows.last_tokens.random_(0, own.rows.sampling.vocab_size)
    table, block_size = own.rows.tables[0], own.attention.shape.block_size
    generator = np.random.default_rng(0)
    positions = generator.permutation(np.linspace(mean * (1 - spread), mean * (1 + spread), rows)).astype(np.int32)
    counts = positions // block_size + 1
    blocks = generator.permutation(int(counts.sum())).astype(np.int32)
    kv = own.decoder._kv
    for cache in (*kv.keys, *kv.values):
        cache[: len(blocks)].normal_()
    for row, count in enumerate(counts):
        table[row, :count] = torch.from_numpy(blocks[counts[:row].sum() :][:count])
    own.staging.send((np.arange(rows, dtype=np.int32), positions))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one replay."""

    ms: float
    joules: float
    """Not a number where the card has no counter."""


def stretch(graph: torch.cuda.CUDAGraph, seconds: float, meter: EnergyMeter | None) -> Cost:
    """Replayed for so long: as in a long run, in which the card's power decides its clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    torch.cuda.synchronize()
    before = meter.joules() if meter else float("nan")
    started_s, count = time.perf_counter(), 0
    start.record()
    while time.perf_counter() - started_s < seconds:
        for _ in range(REPLAYS):
            graph.replay()
        count += REPLAYS
        torch.cuda.current_stream().synchronize()
    end.record()
    end.synchronize()
    drawn = (meter.joules() if meter else float("nan")) - before
    return Cost(start.elapsed_time(end) / count, drawn / count)


def costs(graphs: dict[str, torch.cuda.CUDAGraph], rounds: int, seconds: float) -> dict[str, Cost]:
    """Medians of rounds, in which all take turns, in another order each time: the card allows the next more where the
    one before took less."""
    try:
        meter = EnergyMeter()
    except OSError:
        meter = None
    found: dict[str, list[Cost]] = {name: [] for name in graphs}
    order = list(graphs.items())
    for _ in range(rounds):
        random.shuffle(order)
        for name, graph in order:
            found[name].append(stretch(graph, seconds, meter))
    return {
        name: Cost(median(cost.ms for cost in each), median(cost.joules for cost in each))
        for name, each in found.items()
    }


KEPT: list[dict[str, torch.cuda.CUDAGraph]] = []
"""Of all steps: their memory is one pool, which ends with the last of them."""


def run(backend: CudaBackend, path: DecodePath, rows: int, mean: int, options: argparse.Namespace) -> None:
    variants, graphs = Variants(backend), backend._parts.graphs
    set_contexts(backend, rows, mean, options.spread)
    captured: dict[str, torch.cuda.CUDAGraph] = {}
    KEPT.append(captured)
    layers = len(backend._parts.decoder._weights.layers)
    only = options.only.split(",")
    chosen = [name for name in variants.names() if name == "whole" or any(word in name for word in only)]
    for name in chosen:
        work: Callable[[], None] = lambda: path._run(rows, PLAIN)  # noqa: E731
        with variants.apply(name):
            work()
            if name.startswith("without ") and variants.num_left_out == 0:
                print(f"{rows} streams, {name}: it is part of another kernel there", flush=True)
            else:
                captured[name] = graphs._capture(work)
    found = costs(captured, options.rounds, options.seconds)
    whole = found["whole"]
    contexts = f"contexts of {mean}, {options.spread:.0%} either way"
    print(f"\n{rows} streams, {contexts}: {whole.ms:.3f} ms and {whole.joules:.2f} J a step")
    for name, cost in found.items():
        less_us, less_mj = (whole.ms - cost.ms) * 1e3 / layers, (whole.joules - cost.joules) * 1e3 / layers
        print(
            f"  {name:44s} {cost.ms:8.3f} ms {cost.joules:7.2f} J   a layer less {less_us:+8.2f} us {less_mj:+8.2f} mJ"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", default="256x690,160x910,94x1100,48x1350")
    parser.add_argument("--only", default="", help="words that a variant's name has one of")
    parser.add_argument(
        "--spread", type=float, default=0.6, help="contexts lie within so much of their mean, either way"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.4, help="that each variant runs in a round")
    options = parser.parse_args()
    config = EngineConfig(backend="cuda", load="random", max_context=40960, max_running=256)
    with patch.object(CudaBackend, "prepare", nothing):  # what is captured here compiles what it needs
        assembly = build(options.folder, config)
    print(*assembly.notes, sep="\n")
    backend = assembly.engine.backend
    assert isinstance(backend, CudaBackend)
    for step in options.steps.split(","):
        rows, mean = map(int, step.split("x"))
        run(backend, backend._decodes, rows, mean, options)


if __name__ == "__main__":
    main()
