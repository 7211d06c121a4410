"""The memory behind the KV blocks and where each token of a step lies in it. K and V of one block and one KV head are
together (`kernels/kv_code.py` says how, for each kind). What is stored is finite: kernels saturate, and blocks start as
zeros, so a stale entry under a mask can never spoil a sum."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.memory import SMALL_BYTES, Arena, Bytes
from twostroke.backends.cpu.shape import KernelShape, LayerHeads
from twostroke.backends.cpu.state_store import GroupStates, StateStore
from twostroke.backends.host.batch import Batch
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.models.spec import Recurrent

Int32Array = npt.NDArray[np.int32]
TOUCHED_BYTES = 8 << 20
"""Of all layers together: a first conversation's, of some 350 tokens with SmolLM2."""
_ALIKE: dict[int, LayerHeads] = {}


@dataclass(frozen=True, slots=True)
class LayerPlace:
    group: int
    memory: Bytes  # [num_blocks, kv_heads, block_bytes]


class KVStore:
    def __init__(
        self,
        layout: KVLayout,
        num_kv_heads: int,
        shape: KernelShape,
        mixer: Recurrent | None = None,
        others: Mapping[int, LayerHeads] = _ALIKE,
    ) -> None:
        """`mixer`: of layers that keep a state. `others`: by layer, where not all have these heads; those of a group
        have the same."""
        self._layout, self.shape, self._elements = layout, shape, list[str]()
        self._part = "kv head" if shape.latent is None else "latent"
        self.places: dict[int, LayerPlace] = {}
        self._groups: list[Bytes] = []  # [layers, num_blocks, kv_heads, block_bytes] each; empty: of states
        self.states = StateStore(_states(layout, mixer))
        for index, group in enumerate(layout.groups):
            if group.is_state:
                self._groups.append(np.zeros(0, dtype=np.uint8))
                self._elements.append("")
                continue
            own = others.get(group.layers[0], LayerHeads(num_kv_heads, shape))
            self._elements.append(f"{shape.kv_kind.value} of {_content(own.shape)}, packed for cpu")
            size = (len(group.layers), group.num_blocks, own.num_kv_heads, own.shape.block_bytes)
            memory = _layers_memory(size)
            self._groups.append(memory)
            for position, layer in enumerate(group.layers):
                self.places[layer] = LayerPlace(index, memory[position])

    def block_formats(self) -> tuple[BlockFormat, ...]:
        """K and V of a head lie together, in an order of `kernels/kv_code.py`; latents as K does."""
        formats = []
        for number, (group, memory) in enumerate(zip(self._layout.groups, self._groups, strict=True)):
            if group.is_state:
                formats.append(self.states.groups[number].block_format())
                continue
            num_layers, _, num_heads, block_bytes = memory.shape
            axes = (("layer", num_layers), (self._part, num_heads), ("byte", block_bytes))
            formats.append(BlockFormat(group.layers, group.window, self._elements[number], 1, axes))
        return tuple(formats)

    def copy_out(self, group: int, block: int, into: Bytes) -> None:
        """A block's bytes, as its format says."""
        if group in self.states.groups:
            self.states.groups[group].copy_out(block, into)
            return
        blocks = self._groups[group][:, block]  # [layers, kv_heads, block_bytes]
        into.reshape(blocks.shape)[...] = blocks

    def copy_in(self, group: int, block: int, data: Bytes) -> None:
        if group in self.states.groups:
            self.states.groups[group].copy_in(block, data)
            return
        blocks = self._groups[group][:, block]
        blocks[...] = data.reshape(blocks.shape)

    def states_of(self, layer: int) -> tuple[int, GroupStates]:
        """Of a layer that keeps a state: its group's number, and its states."""
        return next((number, one) for number, one in self.states.groups.items() if layer in one.group.layers)

    def touch(self) -> None:
        """Have the system give the memory of the first blocks now: a step would wait for it, page by page."""
        share = min(TOUCHED_BYTES // len(self.places), SMALL_BYTES)
        held = [layers for layers in self._groups if layers.size]
        for layers in held:  # all layers at once: numpy keeps Python's lock for short assignments
            layers.reshape(len(layers), -1)[:, : share : mmap.PAGESIZE] = 0

    def slots(self, batch: Batch) -> list[Int32Array]:
        """For each group, where every token goes: block * block_size + offset  # [num_tokens]. Raises where the step
        would read or write a block that was never granted: native code would not notice."""
        size = self._layout.block_size
        indices, offsets = np.divmod(batch.positions, size)  # [num_tokens]
        if batch.num_tokens == batch.num_decodes:
            segments, last = batch.segment_first, indices
        else:
            segments = np.repeat(np.arange(batch.num_segments), batch.segment_count)  # [num_tokens]
            last = (batch.segment_start + batch.segment_count - 1) // size  # [num_segments]
        found = []
        used = int(last.max()) + 1
        for group, table in zip(self._layout.groups, batch.tables, strict=True):
            if group.is_state:
                found.append(np.zeros(0, dtype=np.int32))  # `StateStore.runs` looks at its slots
                continue
            if used > table.shape[1]:
                raise IndexError("a step holds a position beyond the context this backend was created for")
            self._check_granted(batch, group, table[:, :used], last)
            found.append(table[segments, indices] * np.int32(size) + offsets)
        return found

    def _check_granted(self, batch: Batch, group: KVGroup, table: Int32Array, last: Int32Array) -> None:
        """`table` [num_segments, entries up to the largest of `last`]"""
        granted = table.view(np.uint32) < group.num_blocks  # negative entries are large ones
        if granted.all():
            return
        entries = np.arange(table.shape[1])
        is_read = entries <= last[:, None]
        if group.window is not None:
            oldest = np.maximum(batch.segment_start - (group.window - 1), 0) // self._layout.block_size
            is_read &= entries >= oldest[:, None]
        if not (granted | ~is_read).all():
            raise IndexError("a step reads or writes a position whose KV block was never granted")


def _states(layout: KVLayout, mixer: Recurrent | None) -> dict[int, GroupStates]:
    found = {number: group for number, group in enumerate(layout.groups) if group.is_state}
    assert mixer is not None or not found
    return {number: GroupStates(group, mixer) for number, group in found.items() if mixer is not None}


def _content(shape: KernelShape) -> str:
    own = shape.latent
    return f"head size {shape.head_dim}" if own is None else f"latents of {own.rank} and {own.rotated_dim}"


def _layers_memory(size: tuple[int, int, int, int]) -> Bytes:
    """Long contexts are read faster from huge pages. But the first blocks of every layer lie far apart: a prompt of
    40 tokens would wait for a huge page in each layer to be zeroed, 60 MB of them for SmolLM2's 1 MB of KV."""
    num_bytes = math.prod(size)
    layer_starts = range(0, num_bytes, max(1, num_bytes // size[0]))
    return Arena(num_bytes, small_at=layer_starts).take(num_bytes).reshape(size)
