"""Captured CUDA graphs, one for each shape of step that recurs: launching hundreds of kernels one by one takes a host
longer than a small step takes the device. Knows when to capture; what is captured is a function that takes nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from twostroke.backends.cuda.compile_ahead import is_rehearsal


class GraphCache:
    """Graphs by key. On a device without graphs (tests on a CPU) the functions are simply run."""

    def __init__(self, device: torch.device) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._device = device
        # One stream for all captures: cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay what was captured under this key; the first time, run `work` and capture it for the next."""
        if self._device.type != "cuda":
            work()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # compiles what is not compiled yet, which must not happen while capturing
        self._graphs[key] = self._capture(work)

    def prepare(self, key: Hashable, work: Callable[[], None]) -> None:
        """Capture before it is needed. `work` is run once first, so it must be harmless."""
        if is_rehearsal():
            work()
        elif self._device.type == "cuda" and key not in self._graphs:
            work()
            self._graphs[key] = self._capture(work)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Without torch.cuda.graph(), which collects garbage and empties caches: tens of milliseconds each time."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        self._pool = self._pool or graph.pool()
        torch.cuda.synchronize(self._device)
        return graph


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """Batch sizes that graphs are made for: every few at first, then in eights, wider apart later."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < limit:
        sizes.append(sizes[-1] + max(8, sizes[-1] // 8 // 8 * 8))
    return (*(size for size in sizes if size < limit), limit)
