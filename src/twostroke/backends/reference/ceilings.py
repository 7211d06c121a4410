"""What numpy reaches on this machine at its best: the ceilings that the reference backend's floors are taken from."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from twostroke.cost.hardware import Ceilings

_READ_BYTES = 64 << 20
_MATRIX_SIZE = 768
_REPEATS = 5


def measure() -> Ceilings:
    """Takes about a tenth of a second."""
    vector = np.ones(_READ_BYTES // 4, dtype=np.float32)
    matrix = np.ones((_MATRIX_SIZE, _MATRIX_SIZE), dtype=np.float32)
    return Ceilings(
        read_bytes_per_s=_READ_BYTES / _best_s(lambda: vector @ vector),
        multiply_adds_per_s=_MATRIX_SIZE**3 / _best_s(lambda: matrix @ matrix),
        source="numpy's matrix and dot products in float32, measured just now",
    )


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started_s)
    return best
