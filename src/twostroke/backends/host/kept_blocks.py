"""Copies of KV blocks in host memory, for a backend whose KV lies in host memory, too: spills on the launch thread, in
the order of steps; loads on a thread of their own, beside the steps that do not need them. A step that needs one helps
to finish it. Knows neither prefixes nor tiers."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.memory_ahead import MemoryAhead
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.step import BlockCopy, Step

Bytes = npt.NDArray[np.uint8]
FIRST_BYTES_PER_S = 4e9
"""Until a copy was timed."""
WEIGHT_OF_LATEST = 0.1


class BlockStore(Protocol):
    """The tensors behind the blocks of one model."""

    def block_formats(self) -> tuple[BlockFormat, ...]:
        """One a KV group."""

    def copy_out(self, group: int, block: int, into: Bytes) -> None:
        """A block's bytes, as its format says."""

    def copy_in(self, group: int, block: int, data: Bytes) -> None: ...


class _Loads:
    """The loads of one step, in their order: whoever has time makes the next."""

    def __init__(self, copies: Sequence[BlockCopy]) -> None:
        self.blocks = {(copy.group, copy.block_id) for copy in copies}
        self.slots = {(copy.group, copy.slot) for copy in copies}
        self.left = deque(copies)
        self._lock, self._num_left = threading.Lock(), len(copies)
        self.done = threading.Event()

    def made(self) -> None:
        """One more copy is."""
        with self._lock:
            self._num_left -= 1
            if not self._num_left:
                self.done.set()


class HostKeptBlocks:
    def __init__(self, store: BlockStore, num_slots: Sequence[int]) -> None:
        self._store = store
        sizes = [form.num_bytes for form in store.block_formats()]
        self._slots = [_memory(count, size) for count, size in zip(num_slots, sizes, strict=True)]
        self._mover = ThreadPoolExecutor(1, thread_name_prefix="kv-load")
        self._loading: list[_Loads] = []
        self._ahead: MemoryAhead | None = None
        self.spill_bytes_per_s = self.load_bytes_per_s = FIRST_BYTES_PER_S

    @property
    def is_idle(self) -> bool:
        return all(loads.done.is_set() for loads in self._loading)

    def touch_ahead(self) -> None:
        if self._ahead is None:
            self._ahead = MemoryAhead(self._slots)

    def view(self, group: int, slot: int) -> memoryview:
        for loads in list(self._loading):
            if (group, slot) in loads.slots:
                self._finish(loads)
        return memoryview(self._slots[group][slot])

    def copy_out(self, group: int, block: int, slot: int) -> None:
        for loads in list(self._loading):
            if (group, block) in loads.blocks or (group, slot) in loads.slots:
                self._finish(loads)
        self._store.copy_out(group, block, self._slots[group][slot])

    # On the launch thread

    def start(self, step: Step) -> None:
        """Make a step's spills, and begin its loads."""
        self._loading = [loads for loads in self._loading if not loads.done.is_set()]
        if step.spills:
            self._spill(step.spills)
        if step.loads:
            loads = _Loads(step.loads)
            self._finish_before(loads.blocks, set())  # two copies into one block come in their order
            self._loading.append(loads)
            self._mover.submit(self._run, loads)

    def _spill(self, spills: Sequence[BlockCopy]) -> None:
        blocks, slots = {copy[:2] for copy in spills}, {(copy.group, copy.slot) for copy in spills}
        self._finish_before(blocks, slots)
        started_s, num_bytes = time.perf_counter(), 0
        for group, block, slot in spills:
            into = self._slots[group][slot]
            self._store.copy_out(group, block, into)
            num_bytes += into.nbytes
        took_s = time.perf_counter() - started_s
        self.spill_bytes_per_s += WEIGHT_OF_LATEST * (num_bytes / max(took_s, 1e-9) - self.spill_bytes_per_s)

    def wait(self, step: Step) -> None:
        """Until blocks that its grants and saves name are loaded: for itself, or for somebody who has gone."""
        if not self._loading or not (step.grants or step.saves):
            return
        blocks = {(grant.group, block) for grant in step.grants for block in grant.block_ids}
        self._finish_before(blocks | {(group, slot) for _, group, slot, _ in step.saves}, set())

    def _finish_before(self, blocks: set[tuple[int, int]], slots: set[tuple[int, int]]) -> None:
        """Somebody is about to use these."""
        for loads in self._loading:
            if not loads.blocks.isdisjoint(blocks) or not loads.slots.isdisjoint(slots):
                self._finish(loads)

    def finish(self) -> None:
        """All that is on its way."""
        for loads in self._loading:
            self._finish(loads)

    def _finish(self, loads: _Loads) -> None:
        """Rather than to wait for a thread that may have no core, do what is left of its work."""
        self._run(loads)
        loads.done.wait()

    def _run(self, loads: _Loads) -> None:
        started_s, num_bytes = time.perf_counter(), 0
        with contextlib.suppress(IndexError):
            while True:
                group, block, slot = loads.left.popleft()
                data = self._slots[group][slot]
                self._store.copy_in(group, block, data)
                num_bytes += data.nbytes
                loads.made()
        if num_bytes:
            took_s = time.perf_counter() - started_s
            self.load_bytes_per_s += WEIGHT_OF_LATEST * (num_bytes / max(took_s, 1e-9) - self.load_bytes_per_s)

    def close(self) -> None:
        self._mover.shutdown(wait=True)
        if self._ahead is not None:
            self._ahead.close()


def _memory(count: int, size: int) -> Bytes:
    """Given by the system as it is used, in huge pages where there are some."""
    memory = mmap.mmap(-1, max(1, count * size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)[: count * size].reshape(count, size)
