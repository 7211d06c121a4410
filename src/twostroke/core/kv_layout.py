"""The shape of the KV space, agreed between the ledger (which counts blocks) and a backend (which holds tensors)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

KVContent = Literal["keys and values", "latent", "state"]
"""What layers leave behind for later tokens: keys and values of each token, a vector of each token that both are made
from, or a state of the whole sequence, of fixed size, that each token changes."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lives and dies together, with block ids of their own. In a group of states a block is a slot: it
    holds one sequence's state, and a sequence has one of them however long it is."""

    layers: tuple[int, ...]
    window: int | None
    """A query at position q reads keys at positions above `q - window`; None: all of them."""
    num_blocks: int
    content: KVContent = "keys and values"
    values: int | None = None
    """Numbers that one token leaves behind in one layer, or of states one sequence; None: not told."""
    model: int = 0
    """Whose layers they are: 0 of the model that answers, from 1 on of those that draft for it."""

    @property
    def is_state(self) -> bool:
        return self.content == "state"


@dataclass(frozen=True, slots=True)
class KVGroupNeed:
    """What one KV group of a model asks for: its layers, its window, its bytes a token on the chosen backend (of a
    state, its bytes a sequence)."""

    layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int
    content: KVContent = "keys and values"
    values: int | None = None
    model: int = 0
    """As `KVGroup` has them."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    block_size: int
    """Tokens in a block."""
    groups: tuple[KVGroup, ...]

    def of_model(self, number: int) -> KVLayout:
        """The groups of one model alone: a backend's store of its KV."""
        return replace(self, groups=tuple(group for group in self.groups if group.model == number))

    def places_of(self, number: int) -> tuple[int, ...]:
        """Where those groups are among all."""
        return tuple(place for place, group in enumerate(self.groups) if group.model == number)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def positions(self, group: KVGroup) -> int:
        """That a group has room for; of states, how many."""
        return group.num_blocks * (1 if group.is_state else self.block_size)

    def entries_for(self, group: KVGroup, num_tokens: int) -> int:
        """Of a sequence's table in a group."""
        return min(1, num_tokens) if group.is_state else self.blocks_for(num_tokens)
