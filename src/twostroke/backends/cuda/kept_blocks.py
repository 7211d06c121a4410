"""Copies of KV blocks in pinned host memory. Blocks that go are gathered on the stream that computes, behind all that
still reads them, and sent on a stream of their own; blocks that come are sent and scattered there, a few layers at a
time, and the step that reads them waits for each layer as it gets to it. Knows neither prefixes nor tiers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch

from twostroke.backends.cuda.draft_blocks import AllBlocks
from twostroke.core.step import BlockCopy, BlockGrant, Step

BATCH_BLOCKS = 8
"""Gathered or scattered together: enough to make launches few, little enough to take no memory to speak of."""
LAYER_PARTS = 4
"""That loads come in: the first layers are there when a quarter is."""
FIRST_BYTES_PER_S = 20e9
"""Until a copy was timed: half of what a card's link takes."""
WEIGHT_OF_LATEST = 0.2


@dataclass(slots=True, eq=False)
class _Job:
    """The copies of one step in one direction."""

    blocks: set[tuple[int, int]]
    num_bytes: int
    is_load: bool
    began: torch.cuda.Event | None = None
    parts: list[tuple[int, torch.cuda.Event]] | None = None
    """Of loads: up to which layer of its group, and when they are there."""
    ended: torch.cuda.Event | None = None


class CudaKeptBlocks:
    def __init__(self, store: AllBlocks, num_slots: Sequence[int], device: torch.device) -> None:
        self._store, self._device = store, device
        is_cuda = device.type == "cuda"
        self._slots = [
            torch.zeros((count, *store.block_shape(group)), dtype=store.dtype_of(group), pin_memory=is_cuda)
            for group, count in enumerate(num_slots)
        ]  # [slots, layers, keys or values, kv_heads, block_size, head_dim], or as the store has a group's blocks
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._jobs: list[_Job] = []
        self._last: dict[tuple[int, int], torch.cuda.Event] = {}  # by slot: when its last copy is made
        self.spill_bytes_per_s = self.load_bytes_per_s = FIRST_BYTES_PER_S

    @property
    def is_idle(self) -> bool:
        return all(job.ended is not None and job.ended.query() for job in self._jobs)

    def touch_ahead(self) -> None:
        """Pinned memory is there from the start."""

    def view(self, group: int, slot: int) -> memoryview:
        event = self._last.get((group, slot))
        if event is not None:
            event.synchronize()
        return self._slots[group][slot].reshape(-1).view(torch.uint8).numpy().data

    def copy_out(self, group: int, block: int, slot: int) -> None:
        if (event := self._last.get((group, slot))) is not None:
            event.synchronize()
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for job in self._jobs:  # it may be on its way to the device
                if (group, block) in job.blocks and job.ended is not None:
                    job.ended.synchronize()
            self._slots[group][slot].copy_(self._store.gather(group, [block])[0])

    def start(self, step: Step) -> None:
        """Queue a step's copies."""
        if self._jobs:
            self._learn()
        if step.spills:
            self._queue(step.spills, is_load=False)
        if step.loads:
            self._queue(step.loads, is_load=True)

    def _queue(self, copies: Sequence[BlockCopy], *, is_load: bool) -> None:
        ordered = sorted(copies, key=attrgetter("group"))
        num_bytes = sum(self._slots[copy.group][copy.slot].nbytes for copy in ordered)
        job = _Job({(copy.group, copy.block_id) for copy in ordered}, num_bytes, is_load)
        if self._stream is None:
            self._copy(ordered, job)
            return
        computing = torch.cuda.current_stream(self._device)
        staged = [] if is_load else self._gathered(ordered)
        self._stream.wait_stream(computing)  # behind all that was launched, which may read what is overwritten
        with torch.cuda.stream(self._stream):
            job.began = torch.cuda.Event(enable_timing=True)
            job.began.record()
            if is_load:
                self._load(ordered, job)
            for blocks, slots in staged:
                blocks.record_stream(self._stream)
                for block, slot in zip(blocks, slots, strict=True):
                    slot.copy_(block, non_blocking=True)
            job.ended = torch.cuda.Event(enable_timing=True)
            job.ended.record()
        for copy in ordered:
            self._last[copy.group, copy.slot] = job.ended
        self._jobs.append(job)

    def _copy(self, copies: Sequence[BlockCopy], job: _Job) -> None:
        """Without a card: at once."""
        if job.is_load:
            self._load(copies, job)
            return
        for blocks, slots in self._gathered(copies):
            for block, slot in zip(blocks, slots, strict=True):
                slot.copy_(block)

    def _gathered(self, copies: Sequence[BlockCopy]) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """Batches of blocks one behind the other on the device, and the slots that they go to."""
        found = []
        for group, own in groupby(copies, key=attrgetter("group")):
            for batch in _batches(list(own)):
                blocks = self._store.gather(group, [copy.block_id for copy in batch])
                found.append((blocks, [self._slots[group][copy.slot] for copy in batch]))
        return found

    def _load(self, copies: Sequence[BlockCopy], job: _Job) -> None:
        """Some layers of all blocks, then the next."""
        job.parts = []
        most = max(len(self._store.layers_of(group)) for group in {copy.group for copy in copies})
        part = -(-most // LAYER_PARTS)
        for first in range(0, most, part):
            for group, own in groupby(copies, key=attrgetter("group")):
                layers = self._store.layers_of(group)[first : first + part]
                if not layers:
                    continue
                for batch in _batches(list(own)):
                    rows = [self._slots[group][copy.slot][first : first + len(layers)] for copy in batch]
                    sent = torch.stack([row.to(self._device, non_blocking=True) for row in rows])
                    self._store.scatter(group, layers, [copy.block_id for copy in batch], sent)
            if self._stream is not None:
                arrived = torch.cuda.Event()
                arrived.record()
                job.parts.append((first + part, arrived))

    # The stream that computes

    def awaited(self, grants: Sequence[BlockGrant]) -> list[_Job]:
        """Loads of blocks that these name, and that are not known to be over."""
        if not self._jobs:
            return []
        return self.loading({(grant.group, block) for grant in grants for block in grant.block_ids})

    def loading(self, blocks: Set[tuple[int, int]]) -> list[_Job]:
        return [job for job in self._jobs if job.is_load and not job.blocks.isdisjoint(blocks)]

    def wait(self, jobs: Sequence[_Job]) -> None:
        """Have the current stream wait for all of them: a graph is launched whole."""
        for job in jobs:
            if job.ended is not None:
                torch.cuda.current_stream(self._device).wait_event(job.ended)

    def wait_for_layer(self, jobs: Sequence[_Job], layer: int) -> None:
        """The same up to a layer of the model: its place in its group is no later."""
        place = self._store.place_of(layer)
        for job in jobs:
            arrived = next((event for end, event in job.parts or () if place < end), None)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)

    def _learn(self) -> None:
        """From copies that are over, what such take."""
        left = []
        for job in self._jobs:
            if job.began is None or job.ended is None or not job.ended.query():
                left.append(job)
                continue
            rate = job.num_bytes / max(1e-6, job.began.elapsed_time(job.ended) / 1e3)
            if job.is_load:
                self.load_bytes_per_s += WEIGHT_OF_LATEST * (rate - self.load_bytes_per_s)
            else:
                self.spill_bytes_per_s += WEIGHT_OF_LATEST * (rate - self.spill_bytes_per_s)
        self._jobs = left


def _batches(copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
    return (copies[first : first + BATCH_BLOCKS] for first in range(0, len(copies), BATCH_BLOCKS))
