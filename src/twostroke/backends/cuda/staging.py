"""The way of small integers from host to device: packed into one pinned buffer, sent by one asynchronous copy. Buffers
are used in turn, and one that is still on its way is waited for. Knows nothing of what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 4
"""In integers: every array begins at 16 bytes, so that kernels see one kind of pointer and are compiled once."""
DEPTH = 4
"""Two steps are in flight at most; the others spare a wait."""

Integers = npt.NDArray[np.int32]


class Staging:
    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity = capacity
        self._is_cuda = device.type == "cuda"
        self._target = torch.zeros(capacity, dtype=torch.int32, device=device)
        buffers = [torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(DEPTH)]
        self._buffers = [(buffer, buffer.numpy()) for buffer in buffers]
        self._sent = [torch.cuda.Event() if self._is_cuda else None for _ in range(DEPTH)]
        self._turn = 0
        self._views: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

    def send(self, arrays: Sequence[Integers]) -> None:
        """Copy the arrays to where `views` of their sizes are found."""
        turn = self._turn
        self._turn = (turn + 1) % DEPTH
        event = self._sent[turn]
        if event is not None:
            event.synchronize()  # returns at once for an event that was never recorded
        buffer, numbers = self._buffers[turn]
        start = end = 0
        for array in arrays:
            end = start + len(array)
            if end > self._capacity:
                raise ValueError(f"{end} integers for a buffer of {self._capacity}")
            numbers[start:end] = array
            start = _aligned(end)
        self._target[:end].copy_(buffer[:end], non_blocking=True)
        if event is not None:
            event.record()

    def views(self, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Where arrays of these sizes lie on the device once sent: the same tensors every time."""
        views = self._views.get(sizes)
        if views is None:
            starts = np.cumsum([0, *(_aligned(size) for size in sizes)])
            views = tuple(self._target[start : start + size] for start, size in zip(starts, sizes, strict=False))
            if len(self._views) < 4096:  # sizes of prefill steps vary without end
                self._views[sizes] = views
        return views


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
