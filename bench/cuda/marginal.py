"""What each kind of kernel costs a decode step where it stands, in time and energy: the step's graph is captured again
without it, and with other configurations and cuts (`step_variants.py`), and all are replayed in turns. A profiler
cannot say: kernels of a chain start before the one ahead has ended, and it counts their waiting. Random weights of a
config.json; contexts spread as in `nano`, or as `--spread` says (0: all are equal).

    PYTHONPATH=src:. python -m bench.cuda.marginal FOLDER [--steps 256x690,160x910,94x1100,48x1350] [--only WORDS]"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

import numpy as np
import torch

from bench.cuda.energy import EnergyMeter
from bench.cuda.step_variants import Variants, nothing
from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.decode import DecodePath
from twostroke.backends.cuda.parts import PLAIN
from twostroke.config import EngineConfig
from twostroke.engine.build import build

REPLAYS = 10


def set_contexts(backend: CudaBackend, path: DecodePath, rows: int, mean: int, spread: float) -> None:
    """Contexts evenly spread, in an order of no meaning, over blocks in an order of no meaning. Keys, values and tokens
    are random: zeros would take less power, and so less time."""
    own = backend._parts
    own.rows.last_tokens.random_(0, own.rows.sampling.vocab_size)
    table, block_size = own.rows.tables[0], own.kernels[0].shape.page
    generator = np.random.default_rng(0)
    positions = generator.permutation(np.linspace(mean * (1 - spread), mean * (1 + spread), rows)).astype(np.int32)
    counts = positions // block_size + 1
    blocks = generator.permutation(int(counts.sum())).astype(np.int32)
    layers = list(own.decoder._mixers._paged.values())
    if len(blocks) >= (held := len(layers[0].keys)):
        raise SystemExit(f"{rows} contexts of {mean} take {len(blocks)} blocks, and there are {held - 1}")
    for cache in (cache for kv in layers for cache in (kv.keys, kv.values)):
        cache[: len(blocks)].normal_()
    for row, count in enumerate(counts):
        table[row, :count] = torch.from_numpy(blocks[counts[:row].sum() :][:count])
    own.staging.send((np.arange(rows, dtype=np.int32),))
    path._positions = torch.from_numpy(positions).to(table.device)  # rows would stand one further with every replay


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
    set_contexts(backend, path, rows, mean, options.spread)
    captured: dict[str, torch.cuda.CUDAGraph] = {}
    KEPT.append(captured)
    layers = len(backend._parts.decoder.weights.layers)
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
