"""What several scripts here share: medians of what a card takes, and lines that say when they were written."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

REPEATS = 21
WARM_UPS = 3
BEGAN_S = time.perf_counter()


def say(*words: object, sep: str = " ") -> None:
    print(f"[{time.perf_counter() - BEGAN_S:5.1f}]", *words, sep=sep, flush=True)


def median_us(work: Callable[[], None], repeats: int = REPEATS) -> float:
    """Microseconds on the card, between two events around each run."""
    for _ in range(WARM_UPS):
        work()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return median(times)
