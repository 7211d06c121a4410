"""The way of small numbers from host to device: packed into one pinned buffer, sent by one asynchronous copy. Buffers
are used in turn, and one that is still on its way is waited for. Knows nothing of what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNED_BYTES = 16
"""Where every array begins, so that kernels see one kind of pointer and are compiled once."""
DEPTH = 4
"""Two steps are in flight at most; the others spare a wait."""

Integers = npt.NDArray[np.int32]


class UploadRing:
    """Copies of one type of number, queued on the current stream, in order."""

    def __init__(self, dtype: torch.dtype, device: torch.device, capacity: int = 64) -> None:
        self._dtype = dtype
        self._alignment = ALIGNED_BYTES // dtype.itemsize
        self._is_cuda = device.type == "cuda"
        self._buffers = [self._buffer(capacity) for _ in range(DEPTH)]
        self._sent = [torch.cuda.Event() if self._is_cuda else None for _ in range(DEPTH)]
        self._turn = 0

    def _buffer(self, capacity: int) -> tuple[torch.Tensor, npt.NDArray[Any]]:
        buffer = torch.zeros(capacity, dtype=self._dtype, pin_memory=self._is_cuda)
        return buffer, buffer.numpy()

    def send(self, arrays: Sequence[npt.NDArray[Any]], destination: torch.Tensor) -> None:
        """Copy the arrays, each from the next aligned place on, to the front of `destination`."""
        end = self.length([len(array) for array in arrays])
        if end > len(destination):
            raise ValueError(f"{end} numbers for a buffer of {len(destination)}")
        turn = self._turn
        self._turn = (turn + 1) % DEPTH
        event = self._sent[turn]
        if event is not None:
            event.synchronize()  # returns at once for an event that was never recorded
        if end > len(self._buffers[turn][0]):
            self._buffers[turn] = self._buffer(1 << (end - 1).bit_length())
        buffer, numbers = self._buffers[turn]
        start = 0
        for array in arrays:
            numbers[start : start + len(array)] = array
            start = self.aligned(start + len(array))
        destination[:end].copy_(buffer[:end], non_blocking=True)
        if event is not None:
            event.record()

    def aligned(self, count: int) -> int:
        return -(-count // self._alignment) * self._alignment

    def length(self, sizes: Sequence[int]) -> int:
        """What arrays of these sizes take, up to the end of the last."""
        return sum(self.aligned(size) for size in sizes[:-1]) + sizes[-1]


class Staging:
    """One place on the device that arrays are sent to again and again: graphs are captured with its views."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._target = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._ring = UploadRing(torch.int32, device, capacity)
        self._views: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

    def send(self, arrays: Sequence[Integers]) -> None:
        """Copy the arrays to where `views` of their sizes are found."""
        self._ring.send(arrays, self._target)

    def views(self, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """Where arrays of these sizes lie on the device once sent: the same tensors every time."""
        views = self._views.get(sizes)
        if views is None:
            starts = np.cumsum([0, *(self._ring.aligned(size) for size in sizes)])
            views = tuple(self._target[start : start + size] for start, size in zip(starts, sizes, strict=False))
            if len(self._views) < 4096:  # sizes of prefill steps vary without end
                self._views[sizes] = views
        return views
