"""The tensors behind the blocks. Keys and values of one sequence lie in blocks anywhere in the pool; its block table
says which. Position p of a sequence is entry `p % block_size` of the block `table[p // block_size]`.

Layers of one KV group (full attention, or one width of sliding window) share block ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.core.kv_layout import KVLayout
from twostroke.models.spec import ModelSpec

Array = npt.NDArray[np.float32]
Slots = npt.NDArray[np.intp]
Table = npt.NDArray[np.int32]


class KVStore:
    def __init__(self, layout: KVLayout, spec: ModelSpec) -> None:
        self._block_size = layout.block_size
        self._group_of: dict[int, int] = {}
        self._keys: dict[int, Array] = {}  # of a layer, [num_blocks, block_size, kv_heads, head_dim]
        self._values: dict[int, Array] = {}
        for group_index, group in enumerate(layout.groups):
            for layer in group.layers:
                attention = spec.layers[layer].grouped
                shape = (group.num_blocks, layout.block_size, attention.num_kv_heads, attention.head_dim)
                self._keys[layer] = np.zeros(shape, dtype=np.float32)
                self._values[layer] = np.zeros(shape, dtype=np.float32)
                self._group_of[layer] = group_index

    def group_of(self, layer: int) -> int:
        return self._group_of[layer]

    def slots(self, batch: Batch) -> list[Slots]:
        """For each group, where every token of the batch goes: block * block_size + offset  # [num_tokens]"""
        segments = np.repeat(np.arange(batch.num_segments), batch.segment_count)  # [num_tokens] whose token it is
        indices, offsets = np.divmod(batch.positions, self._block_size)
        slots = []
        for table in batch.tables:
            blocks = table[segments, indices].astype(np.intp)
            _check_granted(blocks)
            slots.append(blocks * self._block_size + offsets)
        return slots

    def write(self, layer: int, slots: Slots, keys: Array, values: Array) -> None:
        """Put new keys and values [num_tokens, kv_heads, head_dim] into their slots."""
        for store, new in ((self._keys[layer], keys), (self._values[layer], values)):
            store.reshape(-1, *store.shape[2:])[slots] = new  # a view: blocks laid end to end

    def read(self, layer: int, table: Table, start: int, end: int) -> tuple[Array, Array]:
        """One sequence's keys and values at positions start to end - 1, each [end - start, kv_heads, head_dim].
        Blocks before `start` are not looked at: behind a sliding window they may long be another sequence's."""
        first_block = start // self._block_size
        blocks = table[first_block : -(-end // self._block_size)]
        _check_granted(blocks)
        skip = first_block * self._block_size
        wanted = slice(start - skip, end - skip)
        keys, values = self._keys[layer], self._values[layer]
        tail = keys.shape[2:]  # kv_heads, head_dim
        return keys[blocks].reshape(-1, *tail)[wanted], values[blocks].reshape(-1, *tail)[wanted]


def _check_granted(blocks: npt.NDArray[np.signedinteger]) -> None:
    """A negative entry was never granted. As an index it would silently mean another sequence's block."""
    if (blocks < 0).any():
        raise IndexError("a step reads or writes a position whose KV block was never granted")
