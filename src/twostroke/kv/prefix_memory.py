"""What was in the prefix index of late, so that a miss can say why: the token where a prompt leaves an earlier one, or
that its blocks were there and had to go. Bounded; holds tokens and digests, never a block, and decides nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import eq

from twostroke.core.timing import PrefixBreak
from twostroke.kv.prefix_index import PrefixNode

MOST_BLOCKS = 8192
"""Remembered of each kind: some megabytes."""
MOST_COMPARED = 1024
"""Blocks of an earlier prompt that one miss is compared with."""


class PrefixMemory:
    def __init__(self, limit: int = MOST_BLOCKS) -> None:
        self._limit = limit
        self._children: OrderedDict[bytes, tuple[bytes, tuple[int, ...]]] = OrderedDict()
        """From the digest of a prefix to the block that last followed it: its digest and tokens. A tuple, not the
        node: a node holds all that lies before it."""
        self._evicted: OrderedDict[bytes, None] = OrderedDict()

    def saw(self, node: PrefixNode) -> None:
        """A block was entered in the index."""
        assert node.parent is not None
        self._evicted.pop(node.digest, None)
        self._children[node.parent.digest] = (node.digest, node.tokens)
        self._children.move_to_end(node.parent.digest)
        if len(self._children) > self._limit:
            self._children.popitem(last=False)

    def lost(self, node: PrefixNode) -> None:
        """A block had to make room."""
        self._evicted[node.digest] = None
        if len(self._evicted) > self._limit:
            self._evicted.popitem(last=False)

    def clear(self) -> None:
        self._children.clear()
        self._evicted.clear()

    def was_evicted(self, node: PrefixNode) -> bool:
        return node.digest in self._evicted

    def name_behind(self, node: PrefixNode, tokens: tuple[int, ...]) -> bytes | None:
        """The digest of these tokens behind a block, where they are what last followed it."""
        digest, followed = self._children.get(node.digest, (None, None))
        return digest if followed == tokens else None

    def where_it_leaves(self, found: PrefixNode, tokens: Sequence[int], start: int, block_size: int) -> PrefixBreak:
        """`found`: the last block of a prompt that was there; its tokens go on from `start`, and what follows was
        neither found nor evicted."""
        at, same_after = None, 0
        digest, end = found.digest, min(len(tokens), start + MOST_COMPARED * block_size)
        for block_start in range(start, end, block_size):
            child = self._children.get(digest)
            if child is None:
                break
            digest, earlier = child
            ours = tuple(tokens[block_start : block_start + block_size])
            if at is None:  # the first block is never the same: it would have been found
                at = next((place for place, (old, new) in enumerate(zip(earlier, ours, strict=False)) if old != new), 0)
                same_after -= at
            same_after += len(ours) if ours == earlier else sum(map(eq, earlier, ours))
        if at is None:
            return PrefixBreak(start, "new")  # nothing was read behind it so far
        if start + at == 0 and 2 * same_after < len(tokens):
            return PrefixBreak(0, "new")  # another prompt altogether
        return PrefixBreak(start + at, "differs", same_after)
