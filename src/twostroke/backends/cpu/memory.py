"""Memory that kernels read and write: anonymous maps, zero until touched, on lines of 64 bytes. In huge pages what is
read whole; in small ones what is used little by little, since the first touch of a page waits for all its zeros."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

LINE_BYTES = 64
_HUGE_PAGE_BYTES = 1 << 21
SMALL_BYTES = 1 << 20
"""What is in small pages, at least, behind a place that begins with them."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Scalar = TypeVar("Scalar", bound=np.generic)


class Arena:
    """A fixed number of bytes, handed out piece by piece; it lives as long as any piece does."""

    def __init__(self, num_bytes: int, *, huge_pages: bool = True, small_at: Iterable[int] = ()) -> None:
        """In huge pages where the system gives them; but from each byte of `small_at` on, one to three megabytes are
        given little by little."""
        # Private: a shared map, Python's default, is the kernel's shared memory, which gets no huge pages.
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory: Bytes = np.frombuffer(memory, dtype=np.uint8)[:num_bytes]
        self._used = 0  # a map begins on a page, and so on a line
        if num_bytes <= _HUGE_PAGE_BYTES:
            return
        _advise(memory, "MADV_HUGEPAGE" if huge_pages else "MADV_NOHUGEPAGE", 0, num_bytes)  # some give them unasked
        address = address_of(self.memory)
        for place in small_at:
            first = place // mmap.PAGESIZE * mmap.PAGESIZE
            next_huge = padded(address + first + SMALL_BYTES, _HUGE_PAGE_BYTES) - address
            _advise(memory, "MADV_NOHUGEPAGE", first, next_huge - first)

    @staticmethod
    def over(memory: Bytes) -> Arena:
        """Of memory that is there already, from its beginning."""
        if memory.ctypes.data % LINE_BYTES:
            raise ValueError(f"an arena begins on a line of {LINE_BYTES} bytes")
        arena = Arena(0)
        arena.memory = memory
        return arena

    def take(self, num_bytes: int) -> Bytes:
        """Pieces of the same sizes taken in the same order lie at the same places in every arena."""
        piece = self.memory[self._used : self._used + num_bytes]
        if len(piece) != num_bytes:
            raise MemoryError(f"an arena has {len(self.memory) - self._used} bytes left, not {num_bytes}")
        self._used += padded(num_bytes, LINE_BYTES)
        return piece


def zeros(shape: tuple[int, ...], kind: type[Scalar]) -> npt.NDArray[Scalar]:
    """An array of its own on a line of 64 bytes, of which only what is used takes memory."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
    return Arena(num_bytes, huge_pages=False).take(num_bytes).view(kind).reshape(shape)


def float_zeros(*shape: int) -> Floats:
    return zeros(shape, np.float32)


def address_of(array: npt.NDArray[np.generic] | None) -> int:
    """0 stands for absent."""
    return 0 if array is None else int(array.__array_interface__["data"][0])  # `ctypes.data` takes three times as long


def padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _advise(memory: mmap.mmap, advice: str, first: int, num_bytes: int) -> None:
    """Where there are no huge pages there is nothing to choose."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(getattr(mmap, advice), first, num_bytes)
