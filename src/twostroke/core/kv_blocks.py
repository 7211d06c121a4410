"""KV blocks as bytes: what the bytes of a block mean, and who holds copies of blocks in host memory. A description can
be hashed and compared, so that bytes are only taken in where they mean the same. Moves nothing itself."""

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
        """As text that is the same for equal formats, and that `read` takes."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> KVFormat:
        """Raises BadRequestError for what describes none."""
        try:
            given = json.loads(text)
            groups = tuple(_group(**form) for form in given.pop("groups"))
            return cls(**given, groups=groups)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise BadRequestError("a format of KV that cannot be read") from problem

    def has_blocks_of(self, other: KVFormat) -> bool:
        """Whether bytes of the other's blocks are blocks here as they are, whoever computed them."""
        return self.block_size == other.block_size and self.groups == other.groups

    def digest(self) -> str:
        return blake2b(self.described().encode(), digest_size=16).hexdigest()


def _group(layers: list[int], axes: list[list[object]], **others: object) -> BlockFormat:
    named = tuple((str(name), int(size)) for name, size in axes)  # type: ignore[call-overload]
    return BlockFormat(layers=tuple(layers), axes=named, **others)  # type: ignore[arg-type]


class BlockConverter(Protocol):
    """Turns blocks that another engine wrote into this one's."""

    def misfit(self, other: KVFormat) -> str | None:
        """Why its blocks cannot become this engine's, in a sentence; None: they can."""

    def convert(self, other: KVFormat, group: int, sources: Sequence[memoryview], skip: int, into: memoryview) -> None:
        """One block of this engine's, from neighbouring blocks of the other's: those that hold its tokens, of which the
        first has `skip` before them. From any thread."""


class KeptBlocks(Protocol):
    """A backend's copies of blocks in host memory, by group and slot. Steps fill and read slots in launch order."""

    spill_bytes_per_s: float
    """From the device, as measured of late."""
    load_bytes_per_s: float
    """To the device."""

    @property
    def is_idle(self) -> bool:
        """Whether no copy of a step that came back is on its way."""

    def touch_ahead(self) -> None:
        """All slots will be used: have the system give their memory now, beside other work, where it gives it late."""

    def view(self, group: int, slot: int) -> memoryview:
        """A slot's bytes, for whoever brings them from elsewhere or carries them there. Waits for copies of a step that
        came back; the caller sees to it that no step in flight names the slot."""

    def copy_out(self, group: int, block: int, slot: int) -> None:
        """A block's bytes into a slot, now. The caller sees to it that no launched step that has not come back writes
        the block, or names the slot."""
