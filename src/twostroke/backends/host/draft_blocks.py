"""Blocks of drafters as bytes, beside those of the model that answers. Of a drafter's block its own KV goes and comes
back, with it what a head keeps of the block's last token, and a mark of whether all of that was ever written: a block
that nobody drafted for comes back as one that holds nothing. Knows neither prefixes nor tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array
from twostroke.backends.host.kept_blocks import BlockStore, Bytes
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVLayout

MARK_BYTES = 4


class ArrayBlocks:
    """A `BlockStore` over slots of one layer in numpy, one group: arrays [slots, ...], a block's side by side."""

    def __init__(self, arrays: Sequence[Array], block_size: int, what: str) -> None:
        self._blocks = [array.reshape(-1, block_size, *array.shape[1:]) for array in arrays]  # views
        self._what = what

    def block_formats(self) -> tuple[BlockFormat, ...]:
        axes = (("layer", 1), (self._what, len(self._blocks)), ("number", self._blocks[0][0].size))
        return (BlockFormat((0,), None, "float32", 4, axes),)

    def copy_out(self, group: int, block: int, into: Bytes) -> None:
        for part, store in zip(self._parts(into), self._blocks, strict=True):
            part[...] = store[block]

    def copy_in(self, group: int, block: int, data: Bytes) -> None:
        for part, store in zip(self._parts(data), self._blocks, strict=True):
            store[block] = part

    def _parts(self, memory: Bytes) -> Array:
        return memory.view(np.float32).reshape(len(self._blocks), *self._blocks[0].shape[1:])


@dataclass(frozen=True, slots=True)
class DrafterBlocks:
    """What one drafter keeps behind block ids of its groups."""

    store: BlockStore
    is_written: tuple[npt.NDArray[np.bool_], ...]
    """One a group: of each block, whether it holds the drafter's KV of all its tokens."""
    block_ends: Array | None = None  # [num_blocks, hidden]
    """Of a head, what it makes the first slot behind a block from."""

    def format_of(self, group: int) -> BlockFormat:
        own, num_bytes = self.store.block_formats()[group], self._end_bytes + MARK_BYTES
        shape = " x ".join(f"{size} {name}" for name, size in own.axes)
        element = f"{own.element} of a drafter ({shape}), {self._end_bytes} bytes of its last state, and a mark"
        return BlockFormat(own.layers, own.window, element, 1, (("byte", own.num_bytes + num_bytes),))

    @property
    def _end_bytes(self) -> int:
        return 0 if self.block_ends is None else self.block_ends[0].nbytes

    def copy_out(self, group: int, block: int, into: Bytes) -> None:
        kv, end, mark = self._parts(into)
        self.store.copy_out(group, block, kv)
        if self.block_ends is not None:
            end[:] = self.block_ends[block].view(np.uint8)
        mark[:] = self.is_written[group][block]

    def copy_in(self, group: int, block: int, data: Bytes) -> None:
        kv, end, mark = self._parts(data)
        self.store.copy_in(group, block, kv)
        if self.block_ends is not None:
            self.block_ends[block].view(np.uint8)[:] = end
        self.is_written[group][block] = bool(mark.all())  # last: what it says is there by now

    def _parts(self, memory: Bytes) -> tuple[Bytes, Bytes, Bytes]:
        last = len(memory) - MARK_BYTES
        first = last - self._end_bytes
        return memory[:first], memory[first:last], memory[last:]


class AllBlocks:
    """The `BlockStore` of an engine: groups of the model that answers, and of those that draft for it."""

    def __init__(self, layout: KVLayout, target: BlockStore, drafters: dict[int, DrafterBlocks]) -> None:
        """`drafters`: by their `KVGroup.model`."""
        self._owners: list[tuple[BlockStore | DrafterBlocks, int]] = []
        self._formats: list[BlockFormat] = []
        own = target.block_formats()
        for place, group in enumerate(layout.groups):
            number = layout.places_of(group.model).index(place)
            drafter = drafters.get(group.model)
            self._owners.append((target if drafter is None else drafter, number))
            self._formats.append(own[number] if drafter is None else drafter.format_of(number))

    def block_formats(self) -> tuple[BlockFormat, ...]:
        return tuple(self._formats)

    def copy_out(self, group: int, block: int, into: Bytes) -> None:
        store, number = self._owners[group]
        store.copy_out(number, block, into)

    def copy_in(self, group: int, block: int, data: Bytes) -> None:
        store, number = self._owners[group]
        store.copy_in(number, block, data)
