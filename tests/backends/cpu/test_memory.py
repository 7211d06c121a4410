"""Arenas: lines of 64 bytes, and memory that the system may back with huge pages."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from tests.backends.cpu.resident import needs_pagemap, pages_given

from twostroke.backends.cpu.memory import LINE_BYTES, SMALL_BYTES, Arena, address_of, zeros


def test_pieces_lie_on_lines_and_apart() -> None:
    arena = Arena(1000)
    first, second = arena.take(10), arena.take(100)
    assert address_of(first) % LINE_BYTES == address_of(second) % LINE_BYTES == 0
    assert address_of(second) - address_of(first) == LINE_BYTES


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_arenas_ask_for_huge_pages() -> None:
    """Of private memory: for a shared map the kernel would not give them, whatever is asked."""
    piece = Arena(8 << 20).take(8 << 20)
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no transparent huge pages")
    flags = _map_flags(address_of(piece))
    assert "hg" in flags
    assert "sh" not in flags


@needs_pagemap
def test_memory_used_little_by_little_is_given_page_by_page() -> None:
    """At the places that were named, and in arrays of their own: elsewhere a touch may bring a huge page."""
    places = (0, (8 << 20) - 64)  # the second is just in front of where a huge page begins
    arena = Arena(16 << 20, small_at=places).memory
    for place in places:
        arena[place], arena[place + SMALL_BYTES - 1] = 1, 1
        assert pages_given(arena[place : place + SMALL_BYTES]).sum() == 2
    array = zeros((8 << 20,), np.uint8)
    array[5 << 20] = 1
    assert pages_given(array).sum() == 1
    assert "nh" in _map_flags(address_of(array)) or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def _map_flags(address: int) -> list[str]:
    """The VmFlags of the map that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(part, 16) for part in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError("the address is not mapped")
