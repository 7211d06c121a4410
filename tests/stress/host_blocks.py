"""The paged device's copies of blocks in host memory: bytes, filled and read in launch order. A load is made when it
must be, and often not a moment sooner: whoever relied on more reads a wrong number."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

from twostroke.core.kv_blocks import BlockFormat, KVFormat
from twostroke.core.kv_layout import KVLayout
from twostroke.core.step import BlockCopy, Step

NUMBER_BYTES = 8


def block_format(layout: KVLayout) -> KVFormat:
    axes = (("layer", 1), ("position", layout.block_size))
    groups = tuple(BlockFormat(group.layers, group.window, "int64", NUMBER_BYTES, axes) for group in layout.groups)
    return KVFormat("paged", "hashes", layout.block_size, groups)


class HostBlocks:
    def __init__(
        self, layout: KVLayout, kv: list[list[list[int]]], num_slots: Sequence[int], bytes_per_s: float
    ) -> None:
        """`kv`: the device's numbers, by group, block and offset."""
        self.spill_bytes_per_s = self.load_bytes_per_s = bytes_per_s
        self._kv, self._form = kv, f"<{layout.block_size}q"
        size = layout.block_size * NUMBER_BYTES
        self._slots = [[memoryview(bytearray(size)) for _ in range(count)] for count in num_slots]
        self._loading: list[BlockCopy] = []

    @property
    def is_idle(self) -> bool:
        return not self._loading

    def read(self, group: int, block: int) -> bytes:
        """A block of the device, when all that was launched is done."""
        self._finish(lambda copy: True)
        return struct.pack(self._form, *self._kv[group][block])

    def view(self, group: int, slot: int) -> memoryview:
        self._finish(lambda copy: (copy.group, copy.slot) == (group, slot))
        return self._slots[group][slot]

    def copy(self, step: Step, source: random.Random) -> None:
        """Loads wait for a step that is granted their blocks or saves a state there, for a spill that needs their slot
        or block, for whoever looks at the slot; or, half of the time, for nobody."""
        for group, block, slot in step.spills:
            touched = ((group, "slot", slot), (group, "block", block))
            self._finish(lambda copy, touched=touched: not set(_touches(copy)).isdisjoint(touched))  # type: ignore[misc]
            self._slots[group][slot][:] = struct.pack(self._form, *self._kv[group][block])
        self._loading += step.loads
        granted = {(grant.group, block) for grant in step.grants for block in grant.block_ids}
        granted |= {(group, slot) for _, group, slot, _ in step.saves}
        is_quick = source.random() < 0.5
        self._finish(lambda copy: is_quick or (copy.group, copy.block_id) in granted)

    def _finish(self, is_wanted) -> None:  # type: ignore[no-untyped-def]
        """In their order: of two loads into one block the last one counts."""
        for copy in [copy for copy in self._loading if is_wanted(copy)]:
            self._kv[copy.group][copy.block_id][:] = struct.unpack(self._form, self._slots[copy.group][copy.slot])
            self._loading.remove(copy)


def _touches(copy: BlockCopy) -> tuple[tuple[int, str, int], ...]:
    return (copy.group, "slot", copy.slot), (copy.group, "block", copy.block_id)
