"""Which prefix blocks lie in host memory, and in which slot: one pool of slots a KV group, the least recently used
given up first. A slot that a copy still reads or fills is pinned. Holds names, never bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from twostroke.kv.block_pool import ConservationError
from twostroke.kv.prefix_index import PrefixNode

MOST_PASSED = 32
"""Pinned slots that are looked past for one that can be given up."""
UNNAMED = PrefixNode(b"", None, (), "")
"""Of a block whose prefix is not known yet."""


@dataclass(slots=True, eq=False)
class Kept:
    """One block in host memory."""

    node: PrefixNode
    group: int
    slot: int
    pins: int = 0
    """Copies that are not over: spills and loads in steps that have not come back, reads and writes of the disk."""
    origin: str = ""
    """Where it was fetched from, `disk` or `peer`, as long as nobody has loaded it since."""
    is_lost: bool = False
    """It was forgotten while pinned: its slot is free with the last pin."""


class HostTier:
    def __init__(self, num_slots: Sequence[int]) -> None:
        self.num_slots = tuple(num_slots)
        self._free = [list(range(count - 1, -1, -1)) for count in num_slots]
        self._kept: tuple[OrderedDict[bytes, Kept], ...] = tuple(OrderedDict() for _ in num_slots)
        self._hidden: set[Kept] = set()
        """Pinned, and not to be found: being fetched, or lost."""

    def __len__(self) -> int:
        return sum(map(len, self._kept))

    def num_used(self, group: int) -> int:
        return self.num_slots[group] - len(self._free[group])

    def num_pinned(self, group: int) -> int:
        """Slots that copies hold."""
        pinned = sum(kept.pins > 0 for kept in self._kept[group].values())
        return pinned + sum(kept.group == group for kept in self._hidden)

    def kept(self) -> Iterator[Kept]:
        """All that can be found, of each group the least recently used first."""
        for blocks in self._kept:
            yield from blocks.values()

    def taken(self, group: int) -> Iterator[Kept]:
        """Whatever has a slot of this group, found or not."""
        yield from self._kept[group].values()
        yield from (kept for kept in self._hidden if kept.group == group)

    def kept_latest_first(self) -> Iterator[Kept]:
        """The same, the most recently used first, one of each group in turn."""
        for turn in zip_longest(*(reversed(blocks.values()) for blocks in self._kept)):
            yield from (kept for kept in turn if kept is not None)

    def find(self, node: PrefixNode, group: int) -> Kept | None:
        """Believed only after the whole prefix was compared."""
        kept = self._kept[group].get(node.digest)
        return kept if kept is not None and kept.node.same_prefix(node) else None

    def names(self, node: PrefixNode, group: int) -> bool:
        """Whether a block of this name is there, whatever its tokens."""
        return node.digest in self._kept[group]

    def touch(self, kept: Kept) -> None:
        self._kept[kept.group].move_to_end(kept.node.digest)

    def take(self, node: PrefixNode, group: int) -> Kept | None:
        """A pinned slot for a block that is on its way, which `show` makes findable; None: every slot is in use, or
        another prefix has the same hash and keeps its place."""
        if node.digest in self._kept[group]:
            return None
        return self._take(node, group)

    def take_unnamed(self, group: int) -> Kept | None:
        """The same for a block of which it will be known later what it is; `name` says it."""
        return self._take(UNNAMED, group)

    def name(self, kept: Kept, node: PrefixNode) -> None:
        """It is a block of this prefix, as is known now."""
        if kept.node is not UNNAMED:
            raise ConservationError(f"host slot {kept.slot} of KV group {kept.group} has a name already")
        kept.node = node

    def _take(self, node: PrefixNode, group: int) -> Kept | None:
        slot = self._slot(group)
        if slot is None:
            return None
        kept = Kept(node, group, slot, pins=1)
        self._hidden.add(kept)
        return kept

    def _slot(self, group: int) -> int | None:
        if self._free[group]:
            return self._free[group].pop()
        for kept in islice(self._kept[group].values(), MOST_PASSED):
            if not kept.pins:
                del self._kept[group][kept.node.digest]
                kept.is_lost = True
                return kept.slot
        return None

    def show(self, kept: Kept) -> bool:
        """It can be found from now on; False where it was forgotten meanwhile, or another one came first."""
        if kept.is_lost or kept.node.digest in self._kept[kept.group]:
            kept.is_lost = True
            return False
        self._hidden.discard(kept)
        self._kept[kept.group][kept.node.digest] = kept
        return True

    def pin(self, kept: Kept) -> None:
        kept.pins += 1

    def unpin(self, kept: Kept) -> None:
        if kept.pins == 0:
            raise ConservationError(f"host slot {kept.slot} of KV group {kept.group} was unpinned once too often")
        kept.pins -= 1
        if kept.pins == 0 and kept.is_lost:
            self._hidden.discard(kept)
            self._free[kept.group].append(kept.slot)

    def forget(self, kept: Kept) -> None:
        """It cannot be found any more."""
        if kept.is_lost:
            return
        kept.is_lost = True
        if self._kept[kept.group].get(kept.node.digest) is kept:
            del self._kept[kept.group][kept.node.digest]
        if kept.pins:
            self._hidden.add(kept)
        else:
            self._free[kept.group].append(kept.slot)

    def clear(self) -> None:
        for kept in [*self.kept(), *self._hidden]:
            self.forget(kept)

    def check(self, pins: Counter[Kept]) -> None:
        """`pins`: by whom each block should be pinned, counted. Raises ConservationError where the books disagree."""
        for group, count in enumerate(self.num_slots):
            blocks = [*self._kept[group].values(), *(kept for kept in self._hidden if kept.group == group)]
            slots = sorted([*self._free[group], *(kept.slot for kept in blocks)])
            if slots != list(range(count)):
                raise ConservationError(f"KV group {group}: of {count} host slots {slots} are accounted for")
            for kept in blocks:
                if kept.pins != pins[kept]:
                    raise ConservationError(
                        f"KV group {group}: host slot {kept.slot} counts {kept.pins} pins, and {pins[kept]} hold it"
                    )
        for kept in self.kept():
            if kept.is_lost or self._kept[kept.group].get(kept.node.digest) is not kept:
                raise ConservationError(f"host slot {kept.slot} is found under a name that is not its own")
