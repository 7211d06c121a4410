"""The tensors behind the blocks. What a sequence keeps lies in blocks anywhere in the pool; its block table says which.
Position p of a sequence is entry `p % block_size` of the block `table[p // block_size]`. Of a token a layer keeps keys
and values, or, with latent attention, the one vector that both are made from.

Layers of one KV group (full attention, or one width of sliding window) share block ids. Groups of states are in
`state_store.py`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.reference.state_store import StateStore
from twostroke.core.kv_blocks import BlockFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.models.spec import Attention, GroupedAttention, LatentAttention, ModelSpec

Array = npt.NDArray[np.float32]
Slots = npt.NDArray[np.intp]
Table = npt.NDArray[np.int32]


class KVStore:
    def __init__(self, layout: KVLayout, spec: ModelSpec) -> None:
        self._block_size, self._groups = layout.block_size, layout.groups
        self._group_of: dict[int, int] = {}
        self._stores: dict[int, tuple[Array, ...]] = {}  # of a layer, each [num_blocks, block_size, ...]
        self.states = StateStore({place: group for place, group in enumerate(layout.groups) if group.is_state}, spec)
        for group_index, group in enumerate(layout.groups):
            self._group_of |= dict.fromkeys(group.layers, group_index)
            for layer in () if group.is_state else group.layers:
                shapes = ((group.num_blocks, layout.block_size, *own) for own in _kept(spec.layers[layer].attention))
                self._stores[layer] = tuple(np.zeros(shape, dtype=np.float32) for shape in shapes)
        for layer in range(spec.num_layers):  # those that share another's read the very same arrays
            if (source := spec.kv_source(layer)) != layer:
                self._stores[layer], self._group_of[layer] = self._stores[source], self._group_of[source]

    def group_of(self, layer: int) -> int:
        return self._group_of[layer]

    def slots(self, batch: Batch) -> list[Slots]:
        """For each group, where every token of the batch goes: block * block_size + offset  # [num_tokens]

        None of a group of states."""
        segments = np.repeat(np.arange(batch.num_segments), batch.segment_count)  # [num_tokens] whose token it is
        indices, offsets = np.divmod(batch.positions, self._block_size)
        slots = []
        for group, table in zip(self._groups, batch.tables, strict=True):
            if group.is_state:
                slots.append(np.empty(0, dtype=np.intp))
                continue
            blocks = table[segments, indices].astype(np.intp)
            _check_granted(blocks)
            slots.append(blocks * self._block_size + offsets)
        return slots

    def write(self, layer: int, slots: Slots, *kept: Array) -> None:
        """Put what new tokens leave behind into their slots: keys and values [num_tokens, kv_heads, head_dim], or
        latents [num_tokens, width]."""
        for store, new in zip(self._stores[layer], kept, strict=True):
            store.reshape(-1, *store.shape[2:])[slots] = new  # a view: blocks laid end to end

    def block_formats(self) -> tuple[BlockFormat, ...]:
        formats = []
        for place, group in enumerate(self._groups):
            if group.is_state:
                axes = (("layer", len(group.layers)), ("number", self.states.values(place)))
                formats.append(BlockFormat(group.layers, None, "float32", 4, axes))
                continue
            stores = self._stores[group.layers[0]]
            _, block_size, *own = stores[0].shape
            what = "keys, values" if len(stores) == 2 else "latent"
            names = ("kv head", "number") if len(own) == 2 else ("number",)
            outer = (("layer", len(group.layers)), (what, len(stores)), ("position", block_size))
            formats.append(
                BlockFormat(group.layers, group.window, "float32", 4, (*outer, *zip(names, own, strict=True)))
            )
        return tuple(formats)

    def copy_out(self, group: int, block: int, into: npt.NDArray[np.uint8]) -> None:
        """A block's bytes, as its format says."""
        if self._groups[group].is_state:
            self.states.copy_out(group, block, self._state_numbers(group, into))
            return
        for layer, parts in self._parts(group, into):
            for part, store in zip(parts, self._stores[layer], strict=True):
                part[:] = store[block]

    def copy_in(self, group: int, block: int, data: npt.NDArray[np.uint8]) -> None:
        if self._groups[group].is_state:
            self.states.copy_in(group, block, self._state_numbers(group, data))
            return
        for layer, parts in self._parts(group, data):
            for part, store in zip(parts, self._stores[layer], strict=True):
                store[block] = part

    def _state_numbers(self, group: int, memory: npt.NDArray[np.uint8]) -> Array:
        """[layers, values]"""
        return memory.view(np.float32).reshape(len(self._groups[group].layers), -1)

    def _parts(self, group: int, memory: npt.NDArray[np.uint8]) -> Iterator[tuple[int, Array]]:
        """Of each layer, what its stores have of a block: [number of stores, block_size, ...]"""
        layers = self._groups[group].layers
        stores = self._stores[layers[0]]
        shape = (len(layers), len(stores), *stores[0].shape[1:])
        return zip(layers, memory.view(np.float32).reshape(shape), strict=True)

    def read(self, layer: int, table: Table, start: int, end: int) -> tuple[Array, ...]:
        """What one sequence keeps of positions start to end - 1: keys and values, each [end - start, kv_heads,
        head_dim], or latents [end - start, width] alone. Blocks before `start` are not looked at: behind a sliding
        window they may long be another sequence's."""
        first_block = start // self._block_size
        blocks = table[first_block : -(-end // self._block_size)]
        _check_granted(blocks)
        skip = first_block * self._block_size
        wanted = slice(start - skip, end - skip)
        return tuple(store[blocks].reshape(-1, *store.shape[2:])[wanted] for store in self._stores[layer])


def _kept(attention: Attention | None) -> tuple[tuple[int, ...], ...]:
    """The shapes of what a token leaves behind in a layer."""
    if isinstance(attention, GroupedAttention):
        return ((attention.num_kv_heads, attention.head_dim),) * 2
    assert isinstance(attention, LatentAttention)
    return ((attention.kv_values,),)


def _check_granted(blocks: npt.NDArray[np.signedinteger]) -> None:
    """A negative entry was never granted. As an index it would silently mean another sequence's block."""
    if (blocks < 0).any():
        raise IndexError("a step reads or writes a position whose KV block was never granted")
