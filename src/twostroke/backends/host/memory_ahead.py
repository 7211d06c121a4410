"""Memory that the system gives page by page as it is touched: a thread touches it before it is used, behind everybody
else. Changes no byte, so others may fill it meanwhile. Knows not what it is for; Linux alone can do it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14; Python has no name for it. An older kernel refuses it, and nothing is lost."""
PIECE_BYTES = 512 << 10
"""At a time: whoever maps memory meanwhile waits for one."""
NICE = 10


class MemoryAhead:
    def __init__(self, memories: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._memories, self._is_closed = memories, False
        self._thread = threading.Thread(target=self._run, name="kv-touch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if sys.platform != "linux":
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)  # on Linux a thread has its own
        advise = ctypes.CDLL(None).madvise  # without Python's lock, which `mmap.madvise` keeps
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for memory in self._memories:
            start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
            for address in range(start - start % mmap.PAGESIZE, end, PIECE_BYTES):
                if self._is_closed or advise(address, min(PIECE_BYTES, end - address), POPULATE_WRITE):
                    return

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether all was touched, or cannot be."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        self._is_closed = True
        self._thread.join()
