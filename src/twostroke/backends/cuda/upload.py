"""Small arrays on their way to the device, without waiting for it: pinned buffers in a ring, one asynchronous copy
each. Knows nothing of what is in them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

NUM_BUFFERS = 4
"""One more than the steps that are ever in flight, so that the wait for a buffer's last copy is none."""


class UploadRing:
    """Copies are queued on the current stream, in order."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [self._buffer(64) for _ in range(NUM_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_BUFFERS
        self._next = 0

    def _buffer(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int64, pin_memory=self._pinned)

    def send(self, words: npt.NDArray[np.int64], destination: torch.Tensor) -> None:
        """Copy int64 words [count] to the front of `destination`, int64 and at least as long."""
        index, self._next = self._next, (self._next + 1) % NUM_BUFFERS
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[index]) < len(words):
            self._buffers[index] = self._buffer(1 << (len(words) - 1).bit_length())
        buffer = self._buffers[index][: len(words)]
        buffer.numpy()[:] = words
        destination[: len(words)].copy_(buffer, non_blocking=True)
        if self._pinned:
            self._copied[index] = copied = copied or torch.cuda.Event()
            copied.record()
