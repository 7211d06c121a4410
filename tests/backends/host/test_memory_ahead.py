"""Memory that is touched ahead is there before anybody writes to it, and holds what it held."""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import time

import numpy as np
import pytest

from twostroke.backends.host.memory_ahead import POPULATE_WRITE, MemoryAhead

LIMIT_S = 60.0
NUM_BYTES = 32 << 20


def can_be_asked_for() -> bool:
    if sys.platform != "linux":
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    try:
        page.madvise(POPULATE_WRITE)
    except OSError as problem:
        return problem.errno != errno.EINVAL
    return True


needs_it = pytest.mark.skipif(not can_be_asked_for(), reason="the kernel gives memory as it is touched only")


def memory(num_bytes: int = NUM_BYTES) -> np.ndarray:
    """In small pages, of which the system gives one at a time."""
    given = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    given.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(given, dtype=np.uint8)


def num_there(held: np.ndarray) -> int:
    """Bytes that the system has given."""
    pages = np.zeros(-(-held.nbytes // mmap.PAGESIZE), dtype=np.uint8)
    known = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(held.ctypes.data), ctypes.c_size_t(held.nbytes), ctypes.c_void_p(pages.ctypes.data)
    )
    assert known == 0, ctypes.get_errno()
    return int((pages & 1).sum()) * mmap.PAGESIZE


@needs_it
def test_it_is_there_before_it_is_used_and_holds_what_was_written() -> None:
    held = [memory(), memory()]
    held[0][5_000_000:5_000_100] = 7
    assert num_there(held[0]) < NUM_BYTES // 2 and num_there(held[1]) == 0
    ahead = MemoryAhead(held)
    written = held[1][::-65_537]  # from the other end, meanwhile
    written[:] = 9
    assert ahead.wait(LIMIT_S)
    ahead.close()
    assert [num_there(one) for one in held] == [NUM_BYTES, NUM_BYTES]
    assert held[0].sum(dtype=np.int64) == 700 and held[1].sum(dtype=np.int64) == 9 * len(written)
    assert (written == 9).all()


@needs_it
def test_odd_addresses_are_no_trouble() -> None:
    held = memory()[3 : NUM_BYTES - 5]
    ahead = MemoryAhead([held, held[:0]])
    assert ahead.wait(LIMIT_S)
    assert num_there(held[mmap.PAGESIZE - 3 :]) >= held.nbytes - mmap.PAGESIZE


@needs_it
def test_an_end_waits_for_a_piece_alone() -> None:
    ahead = MemoryAhead([memory(1 << 30)])
    began_s = time.thread_time()
    ahead.close()
    assert ahead.wait(0) and time.thread_time() - began_s < 1.0
