"""Which pages of an array the system has given already, by /proc/self/pagemap."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from twostroke.backends.cpu.memory import address_of

PAGEMAP = Path("/proc/self/pagemap")
_PRESENT = np.uint64(1 << 63)

needs_pagemap = pytest.mark.skipif(not PAGEMAP.exists(), reason="reads /proc/self/pagemap")


def pages_given(array: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    """For each page that the array lies in, whether touching it takes no fault."""
    first = address_of(array) // mmap.PAGESIZE
    last = (address_of(array) + array.nbytes - 1) // mmap.PAGESIZE
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first + 1)), dtype=np.uint64)
    return (entries & _PRESENT) != 0
