"""A start on the card, piece by piece: how long it rehearses, how long the graphs take and what of that is the
sample, the capture and the making of the graph itself. Run it twice: the first time compiles.

    PYTHONPATH=src python -m bench.cuda.start_times FOLDER [--profile 30]"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import torch

from twostroke.backends.cuda.backend import CudaBackend
from twostroke.backends.cuda.compile_ahead import is_rehearsal
from twostroke.backends.cuda.graphs import GraphCache
from twostroke.config import EngineConfig
from twostroke.engine.build import build

SECONDS: dict[str, float] = defaultdict(float)
GRAPHS: dict[Hashable, float] = {}
PROFILE = cProfile.Profile()


def timed(owner: type, method: str, label: Callable[[], str]) -> None:
    original = getattr(owner, method)

    def run(*arguments: Any, **named: Any) -> Any:
        name, started_s = label(), time.perf_counter()
        try:
            return original(*arguments, **named)
        finally:
            SECONDS[name] += time.perf_counter() - started_s

    setattr(owner, method, run)


def watch(is_profiled: bool) -> None:
    timed(CudaBackend, "prepare", lambda: "rehearsal" if is_rehearsal() else "prepare, all of it")
    timed(GraphCache, "_capture", lambda: "  captures")
    timed(torch.cuda.CUDAGraph, "capture_end", lambda: "    of them making graphs")
    prepare = GraphCache.prepare

    def one(self: GraphCache, key: Hashable, work: Callable[[], None], sample: Callable[[], None]) -> None:
        def noting() -> None:
            started_s = time.perf_counter()
            sample()
            SECONDS["  samples"] += time.perf_counter() - started_s

        started_s = time.perf_counter()
        if is_profiled:
            PROFILE.runcall(prepare, self, key, work, noting)
        else:
            prepare(self, key, work, noting)
        GRAPHS[key] = time.perf_counter() - started_s

    GraphCache.prepare = one  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--profile", type=int, default=0, metavar="LINES", help="of the graphs; makes them slower")
    options = parser.parse_args()
    watch(options.profile > 0)
    started_s = time.perf_counter()
    assembly = build(options.folder, EngineConfig(backend="cuda", load="random", max_context=8192))
    SECONDS["from nothing to ready"] = time.perf_counter() - started_s
    if options.profile:
        pstats.Stats(PROFILE).sort_stats("tottime").print_stats(options.profile)
    slowest = sorted(GRAPHS, key=lambda key: GRAPHS[key], reverse=True)
    for key in slowest[:5]:
        print(f"{GRAPHS[key] * 1e3:7.1f} ms  {key}")
    print(f"{GRAPHS[slowest[len(slowest) // 2]] * 1e3:7.1f} ms  the median graph of {len(GRAPHS)}")
    for name, seconds in SECONDS.items():
        print(f"{seconds:7.2f} s   {name}")
    print(*assembly.notes[-3:], sep="\n")  # and whether a graph was made again


if __name__ == "__main__":
    main()
