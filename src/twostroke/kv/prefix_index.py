"""Finds the blocks that hold the KV of a prefix of tokens. A block is named by a keyed hash chained over all blocks
before it. A hit is believed only after the whole prefix was compared: a collision is a miss, never a wrong answer.
Knows nothing of reference counts: the ledger keeps pools and index in step."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

DIGEST_BYTES = 16
KEY_BYTES = 32

Digest = Callable[[bytes, tuple[int, ...]], bytes]
"""Names a block by the name of what lies before it and by its tokens. A namespace is named by its own bytes and no
tokens."""


def keyed_digest(key: bytes) -> Digest:
    """Returns a digest that needs the key. Without the key nobody can choose prompts whose hashes collide, or learn a
    prompt from a hash."""

    begun = blake2b(key=key, digest_size=DIGEST_BYTES)  # the key is hashed once, for all digests

    def digest(before: bytes, tokens: tuple[int, ...]) -> bytes:
        hashing = begun.copy()
        hashing.update(before + array("q", tokens).tobytes())
        return hashing.digest()

    return digest


def quick_digest(before: bytes, tokens: tuple[int, ...]) -> bytes:
    """A digest that takes a quarter of the time, for prompts that nobody sent, as in simulations. A collision is a miss
    in any case."""
    return hash((before, tokens)).to_bytes(8, "little", signed=True)


@dataclass(slots=True, eq=False)
class PrefixNode:
    """One full block of a prefix, linked to the prefix before it. A root has no parent and no tokens."""

    digest: bytes
    parent: PrefixNode | None
    tokens: tuple[int, ...]
    namespace: str

    def same_prefix(self, other: PrefixNode) -> bool:
        """Whether both name the same tokens in the same namespace. Chains that met once share their nodes, because the
        ledger adopts the index's, so this rarely walks more than one link."""
        mine, theirs = self, other
        while mine is not theirs:
            if mine.tokens != theirs.tokens or mine.digest != theirs.digest:
                return False
            if mine.parent is None or theirs.parent is None:
                return mine.parent is theirs.parent and mine.namespace == theirs.namespace
            mine, theirs = mine.parent, theirs.parent
        return True


@dataclass(slots=True, eq=False)
class PrefixEntry:
    node: PrefixNode
    blocks: list[int | None]
    """For each KV group, the block that holds this prefix's last `block_size` tokens, if the group still has it."""


class PrefixListener(Protocol):
    """Is told of every change, within the step that makes it. So it only notes the change, and returns at once."""

    def stored(self, node: PrefixNode, group: int) -> None:
        """Called when this prefix's last block can be found in this group from now on."""

    def removed(self, node: PrefixNode, group: int) -> None: ...

    def cleared(self) -> None:
        """Called when nothing can be found any more."""


class PrefixIndex:
    def __init__(self, num_groups: int, *, key: bytes | None = None, digest: Digest | None = None) -> None:
        self._num_groups = num_groups
        self._digest = digest or keyed_digest(secrets.token_bytes(KEY_BYTES) if key is None else key)
        self._entries: dict[bytes, PrefixEntry] = {}
        self.listener: PrefixListener | None = None
        self._of_block: tuple[dict[int, PrefixEntry], ...] = tuple({} for _ in range(num_groups))

    def __len__(self) -> int:
        return len(self._entries)

    def root(self, namespace: str) -> PrefixNode:
        """Returns the node that the chains of a namespace begin with. Chains of two namespaces never meet."""
        return PrefixNode(self._digest(namespace.encode(), ()), None, (), namespace)

    def child(self, parent: PrefixNode, tokens: tuple[int, ...], digest: bytes | None = None) -> PrefixNode:
        """Returns the node of one more full block. It is hashed once for all groups, or not at all if its digest is
        known."""
        if digest is None:
            digest = self._digest(parent.digest, tokens)
        elif (entry := self._entries.get(digest)) is not None:
            node = entry.node
            if node.parent is parent and node.tokens == tokens:
                return node
        return PrefixNode(digest, parent, tokens, parent.namespace)

    def find(self, node: PrefixNode) -> PrefixEntry | None:
        entry = self._entries.get(node.digest)
        return entry if entry is not None and entry.node.same_prefix(node) else None

    def find_or_add(self, node: PrefixNode) -> PrefixEntry | None:
        """Returns the entry for this prefix. If it is new, the caller places a block in it at once. None means that
        another prefix has the same hash: the first one keeps its place."""
        entry = self._entries.get(node.digest)
        if entry is not None:
            return entry if entry.node is node or entry.node.same_prefix(node) else None
        entry = self._entries[node.digest] = PrefixEntry(node, [None] * self._num_groups)
        return entry

    def place(self, entry: PrefixEntry, group: int, block: int) -> None:
        entry.blocks[group] = block
        self._of_block[group][block] = entry
        if self.listener is not None:
            self.listener.stored(entry.node, group)

    def remove(self, group: int, block: int) -> None:
        """Forgets one group's block. An entry goes with its last block."""
        entry = self._of_block[group].pop(block)
        entry.blocks[group] = None
        if entry.blocks.count(None) == self._num_groups:
            del self._entries[entry.node.digest]
        if self.listener is not None:
            self.listener.removed(entry.node, group)

    def entry_of(self, group: int, block: int) -> PrefixEntry | None:
        return self._of_block[group].get(block)

    def entries(self) -> Iterator[PrefixEntry]:
        return iter(self._entries.values())
