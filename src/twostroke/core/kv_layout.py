"""The shape of the KV space, agreed between the ledger (which counts blocks) and a backend (which holds tensors)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

KVContent = Literal["keys and values", "latent", "state"]
"""What layers leave behind for later tokens. "keys and values" are those of each token. "latent" is one vector of each
token that both are made from. "state" is a state of the whole sequence, of fixed size, which each token changes."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV is kept and freed together, with block ids of their own. In a group of states a block is a slot:
    it holds the state of one sequence, and a sequence has one of them however long it is."""

    layers: tuple[int, ...]
    window: int | None
    """A query at position q reads keys at positions above `q - window`. None means that it reads all of them."""
    num_blocks: int
    content: KVContent = "keys and values"
    values: int | None = None
    """How many numbers one token leaves behind in one layer; in a group of states, one sequence. None means that nobody
    said."""
    model: int = 0
    """The model that the layers belong to: 0 is the one that answers; models that draft for it count from 1."""

    @property
    def is_state(self) -> bool:
        return self.content == "state"


@dataclass(frozen=True, slots=True)
class KVGroupNeed:
    """What one KV group of a model needs: its layers, its window, and its bytes for each token on the chosen backend.
    For a state these are bytes for each sequence."""

    layers: tuple[int, ...]
    window: int | None
    bytes_per_token: int
    content: KVContent = "keys and values"
    values: int | None = None
    model: int = 0
    """These three are as in `KVGroup`."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    block_size: int
    """Tokens in a block."""
    groups: tuple[KVGroup, ...]

    def of_model(self, number: int) -> KVLayout:
        """Returns a layout with the groups of one model alone. A backend's store for that model takes it."""
        return replace(self, groups=tuple(group for group in self.groups if group.model == number))

    def places_of(self, number: int) -> tuple[int, ...]:
        """Returns the places of that model's groups among all groups."""
        return tuple(place for place, group in enumerate(self.groups) if group.model == number)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def positions(self, group: KVGroup) -> int:
        """Returns how many positions a group has room for. In a group of states it is how many states."""
        return group.num_blocks * (1 if group.is_state else self.block_size)

    def entries_for(self, group: KVGroup, num_tokens: int) -> int:
        """Returns how many entries a sequence of this length has in its block table for a group."""
        return min(1, num_tokens) if group.is_state else self.blocks_for(num_tokens)
