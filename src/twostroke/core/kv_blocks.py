"""KV blocks as bytes: a description of what the bytes of a block mean, and an interface to copies of blocks in host
memory. A description can be hashed and compared, so that bytes are only accepted where they mean the same. Moves
nothing itself."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Protocol

from twostroke.core.errors import BadRequestError


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The bytes of one block of one KV group: an array in C order, little-endian."""

    layers: tuple[int, ...]
    window: int | None
    element: str
    """The kind of one entry, like `float32`, or the name of a backend's own packing."""
    element_bytes: int
    axes: tuple[tuple[str, int], ...]
    """The names and sizes of the axes, the outermost first. The first is the layer, so that bytes come in layer
    order."""

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
    """All that decides the numbers beside the weights, like the kind of arithmetic or an instruction set."""
    block_size: int
    groups: tuple[BlockFormat, ...]

    def described(self) -> str:
        """Returns a text that is the same for equal formats. `read` takes it."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> KVFormat:
        """Returns the format that a text describes. Raises BadRequestError if it describes none."""
        try:
            given = json.loads(text)
            groups = tuple(_group(**form) for form in given.pop("groups"))
            return cls(**given, groups=groups)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise BadRequestError("a format of KV that cannot be read") from problem

    def has_blocks_of(self, other: KVFormat) -> bool:
        """Whether blocks of the other format can be used here as they are. Who computed them makes no difference."""
        return self.block_size == other.block_size and self.groups == other.groups

    def digest(self) -> str:
        return blake2b(self.described().encode(), digest_size=16).hexdigest()


def _group(layers: list[int], axes: list[list[object]], **others: object) -> BlockFormat:
    named = tuple((str(name), int(size)) for name, size in axes)  # type: ignore[call-overload]
    return BlockFormat(layers=tuple(layers), axes=named, **others)  # type: ignore[arg-type]


class BlockConverter(Protocol):
    """Turns blocks that another engine wrote into blocks of this engine."""

    def misfit(self, other: KVFormat) -> str | None:
        """Returns a sentence on why blocks of that format cannot become this engine's. None means that they can."""

    def convert(self, other: KVFormat, group: int, sources: Sequence[memoryview], skip: int, into: memoryview) -> None:
        """Writes one block of this engine into `into`. `sources` are the neighbouring blocks of the other engine that
        hold its tokens; `skip` tokens of the first come before it. May be called on any thread."""


class KeptBlocks(Protocol):
    """A backend's copies of blocks in host memory, found by group and slot. Steps fill and read slots in launch
    order."""

    spill_bytes_per_s: float
    """Measured speed of recent copies from the device."""
    load_bytes_per_s: float
    """Measured speed of recent copies to the device."""

    @property
    def is_idle(self) -> bool:
        """Whether all copies of the steps that came back are done."""

    def touch_ahead(self) -> None:
        """Makes the system give the memory of all slots now, beside other work. Some systems give memory only when it
        is first used, which would be later and slower."""

    def view(self, group: int, slot: int) -> memoryview:
        """Returns a slot's bytes, for a caller that brings them from elsewhere or carries them there. Waits for copies
        of the steps that came back. The caller makes sure that no step in flight names the slot."""

    def copy_out(self, group: int, block: int, slot: int) -> None:
        """Copies a block's bytes into a slot now. The caller makes sure that no step in flight writes the block or
        names the slot."""
