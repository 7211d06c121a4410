"""Captured CUDA graphs, one for each shape of step that recurs: launching hundreds of kernels one by one takes a host
longer than a small step takes the device. Knows when to capture; what is captured is a function that takes nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any

import torch


class GraphCache:
    """Graphs by key. On a device without graphs (tests on a CPU) the functions are simply run."""

    def __init__(self, device: torch.device, *, captures: bool = True) -> None:
        """`captures` False: something in every step is no part of a graph."""
        self._device, self._captures = device, captures and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._failed: list[torch.cuda.CUDAGraph] = []
        self._uncaptured: set[Hashable] = set()
        self.num_made_again = 0
        """Captures at start that met something new behind their sample."""
        # One stream for all captures: cuBLAS keeps a workspace for each stream that it has seen.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Replay what was captured under this key; the first time, run `work` and capture it for the next."""
        if not self._captures:
            work()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # compiles what is not compiled yet, which must not happen while capturing
        if key in self._uncaptured:
            return
        try:
            self._graphs[key] = self._capture(work)
        except Exception:  # for want of memory, say: this step is on its way all the same, and so will others be
            self._uncaptured.add(key)

    def prepare(self, key: Hashable, work: Callable[[], None], sample: Callable[[], None]) -> None:
        """Capture `work` before it is needed. `sample`, a part of it that meets every kernel, is run before that, so it
        must be harmless: what is met for the first time, a kernel to be loaded or a library's heuristics, may spoil a
        capture."""
        if self._device.type == "cuda" and key not in self._graphs:
            sample()
            if not self._captures:
                return
            try:
                self._graphs[key] = self._capture(work)
            except Exception:  # of something new in what was left out: run all of it; if it was not that, it recurs
                self.num_made_again += 1
                work()
                self._graphs[key] = self._capture(work)

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Beside whatever the device is at: nothing is waited for. Without torch.cuda.graph(), which collects garbage
        and empties caches: tens of milliseconds each time."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    self._end(graph)
        except Exception:
            self._pool = torch.cuda.graph_pool_handle()  # the other's graphs may be gone: then torch takes it no more
            raise
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except Exception:
            # Torch 2.11 leaves a failed capture's pool taken, later releases do not: on the device it can be freed, on
            # the host not, where the graph will be asked again what is its own.
            with suppress(RuntimeError, AttributeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)  # the stream's
            self._failed.append(graph)
            raise


def buckets_up_to(limit: int) -> tuple[int, ...]:
    """Batch sizes that graphs are made for: every few at first, then in eights, wider apart later."""
    sizes = [1, 2, 3, 4, 6, 8]
    while sizes[-1] < limit:
        sizes.append(sizes[-1] + max(8, sizes[-1] // 8 // 16 * 16))
    return (*(size for size in sizes if size < limit), limit)
