"""The blocks of one KV group: reference counts, a stack of blocks with nothing in them, and an LRU of blocks that
nobody references but whose content can still be found. Knows neither tokens nor hashes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping


class ConservationError(RuntimeError):
    """A block was lost, counted twice or shared wrongly. This is always a bug, and no user's fault."""


class BlockPool:
    """Every block is exactly one of free, cached (findable, unreferenced) or referenced; all operations are O(1)."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV group needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._findable = bytearray(num_blocks)  # 1: the prefix index has an entry for the block's content
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low ids come first, and recently used ones again
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently released first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_available

    def references(self, block: int) -> int:
        return self._references[block]

    def cached_blocks(self) -> Iterable[int]:
        """Blocks that nobody holds and that can be found again."""
        return self._cached

    def is_findable(self, block: int) -> bool:
        return bool(self._findable[block])

    def allocate(self) -> int:
        """Returns a block for one holder. A cached block is given up only if no free one is left, the least recently
        used first."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._findable[block] = 0
            self._on_evict(block)
        self._references[block] = 1
        return block

    def allocate_many(self, count: int) -> list[int]:
        """Returns `count` blocks, each as `allocate` gives it."""
        if count > len(self._free):
            return [self.allocate() for _ in range(count)]
        first = len(self._free) - count
        blocks = self._free[first:]
        del self._free[first:]
        blocks.reverse()
        for block in blocks:
            self._references[block] = 1
        return blocks

    def retain(self, block: int) -> None:
        """Counts one holder more for a block that was found in the prefix index."""
        if self._references[block] == 0:
            del self._cached[block]  # a free block cannot be found, so it must be here
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Counts one holder less. Release a sequence's blocks tail first, so that tails are evicted before heads: a
        prefix is of use without its tail, but a tail is of no use without its head."""
        if self._references[block] == 0:
            raise ConservationError(f"block {block} was released more often than it was taken")
        self._references[block] -= 1
        if self._references[block] == 0:
            if self._findable[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def release_many(self, blocks: Iterable[int]) -> None:
        """Releases each of these blocks, in this order."""
        references, findable = self._references, self._findable
        for block in blocks:
            if references[block] != 1:
                self.release(block)
                continue
            references[block] = 0
            if findable[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def mark_findable(self, block: int) -> None:
        """Called when the prefix index has an entry for this referenced block."""
        self._findable[block] = 1

    def make_stalest(self, block: int) -> None:
        """Makes this block the next to be given up, if nobody holds it."""
        if block in self._cached:
            self._cached.move_to_end(block, last=False)

    def mark_lost(self, block: int) -> None:
        """Called when the prefix index dropped its entry for this block."""
        self._findable[block] = 0
        if self._references[block] == 0:
            del self._cached[block]
            self._free.append(block)

    def cached_latest_first(self) -> list[int]:
        """Returns blocks that nobody holds and that can be found, the latest first: of one sequence, heads before
        tails."""
        return list(reversed(self._cached))

    def evict_cached(self) -> None:
        """Gives up every block that is kept only because it may be found again."""
        while self._cached:
            block, _ = self._cached.popitem(last=False)
            self._findable[block] = 0
            self._on_evict(block)
            self._free.append(block)

    def check(self, held: Mapping[int, int]) -> None:
        """Compares the pool with `held`, which says how many tables hold each block. Raises ConservationError if they
        differ."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise ConservationError("a block is in the free stack twice")
        for block in range(self.num_blocks):
            references = self._references[block]
            if references != held.get(block, 0):
                raise ConservationError(
                    f"block {block} counts {references} references and is in {held.get(block, 0)} tables"
                )
            places = (block in free) + (block in self._cached) + (references > 0)
            if places != 1:
                raise ConservationError(
                    f"block {block} is in {places} places: free {block in free}, cached {block in self._cached}, "
                    f"referenced {references}"
                )
            if self._findable[block] and block in free:
                raise ConservationError(f"block {block} is free and still findable")
            if not self._findable[block] and block in self._cached:
                raise ConservationError(f"block {block} is cached and cannot be found")
