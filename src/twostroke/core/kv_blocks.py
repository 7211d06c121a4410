"""KV blocks as bytes: what the bytes of a block mean, and who holds copies of blocks in host memory. A description can
be hashed and compared, so that bytes are only taken in where they mean the same. Moves nothing itself."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The bytes of one block of one KV group: an array in C order, little-endian."""

    layers: tuple[int, ...]
    window: int | None
    element: str
    """What one entry is, like `float32`, or the name of a backend's own packing."""
    element_bytes: int
    axes: tuple[tuple[str, int], ...]
    """Names and sizes, the outermost first. The first is the layer, so that bytes come in layer order."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The blocks of all KV groups of one backend. Two engines whose formats are equal may exchange bytes."""

    backend: str
    arithmetic: str
    """What decides the numbers beside the weights: kinds of arithmetic, an instruction set."""
    block_size: int
    groups: tuple[BlockFormat, ...]

    def described(self) -> str:
        """As text that is the same for equal formats."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        return blake2b(self.described().encode(), digest_size=16).hexdigest()


class KeptBlocks(Protocol):
    """A backend's copies of blocks in host memory, by group and slot. Steps fill and read slots in launch order."""

    spill_bytes_per_s: float
    """From the device, as measured of late."""
    load_bytes_per_s: float
    """To the device."""

    @property
    def is_idle(self) -> bool:
        """Whether no copy of a step that came back is on its way."""

    def view(self, group: int, slot: int) -> memoryview:
        """A slot's bytes, for whoever brings them from elsewhere or carries them there. Waits for copies of a step that
        came back; the caller sees to it that no step in flight names the slot."""

    def copy_out(self, group: int, block: int, slot: int) -> None:
        """A block's bytes into a slot, now. The caller sees to it that no launched step that has not come back writes
        the block, or names the slot."""
