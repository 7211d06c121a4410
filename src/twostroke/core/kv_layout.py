"""The shape of the KV space, agreed between the ledger (which counts blocks) and a backend (which holds tensors)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lives and dies together, with block ids of their own."""

    layers: tuple[int, ...]
    window: int | None
    """A query at position q reads keys at positions above `q - window`; None: all of them."""
    num_blocks: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    block_size: int
    """Tokens in a block."""
    groups: tuple[KVGroup, ...]

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
