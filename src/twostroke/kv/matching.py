"""Finds the longest prefix of a sequence that need not be computed: what the device holds, or what device, host memory
and disk hold together. A full group needs all blocks of a prefix, a window only those that can still be read, and a
group of states a snapshot taken where the prefix ends. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.sequence import Sequence
from twostroke.kv.prefix_chains import PrefixChains
from twostroke.kv.prefix_index import PrefixEntry, PrefixIndex, PrefixNode
from twostroke.kv.tiers.files import Found
from twostroke.kv.tiers.host import Kept
from twostroke.kv.tiers.tiers import KVTiers


class MatchedLoad(NamedTuple):
    """A block of the prefix that host memory has, and the device has not."""

    group: int
    place: int
    """The index of its entry in the block table."""
    kept: Kept


class MatchedFetch(NamedTuple):
    """A block of the prefix that only the disk has."""

    node: PrefixNode
    group: int
    found: Found


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix. It is valid until the next change of the ledger."""

    num_tokens: int
    tables: tuple[tuple[int | None, ...], ...]
    """The block table of each group. An entry is None if it is behind a window, or if its block is to be loaded. In a
    group of states the table has one entry, for the sequence's own slot, if a state is to be loaded into it."""
    states: tuple[int | None, ...] = ()
    """The snapshot behind these tokens, for each group of states. An entry is None if it is to be loaded. Empty means
    that there is no snapshot."""
    num_known: int = 0
    """If the model has states, the tokens that could be had if no snapshot were needed."""
    loads: tuple[MatchedLoad, ...] = ()
    fetches: tuple[MatchedFetch, ...] = ()
    num_passed_by: int = 0
    """Further tokens that tiers have, and that are predicted to be computed faster than loaded."""

    def num_loads(self, group: int) -> int:
        return sum(load.group == group for load in self.loads)


class PrefixMatcher:
    def __init__(self, layout: KVLayout, index: PrefixIndex, chains: PrefixChains) -> None:
        self._layout, self._index, self._chains = layout, index, chains
        self._has_states = any(group.is_state for group in layout.groups)
        self._has_blocks = any(not group.is_state for group in layout.groups)
        self._is_plain = all(group.window is None and not group.is_state for group in layout.groups)

    @property
    def block_size(self) -> int:
        return self._layout.block_size

    def first_needed(self, group: KVGroup, position: int) -> int:
        """Returns the first block that a query at `position` or later can read. In a group of states it is the block
        with the snapshot."""
        if group.is_state:
            return max(0, position // self._layout.block_size - 1)
        if group.window is None:
            return 0
        return max(0, position - group.window + 1) // self._layout.block_size

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Returns what the device holds. It is always at least one token short of the known tokens, so that something
        is left to compute."""
        return self._match_in_full(sequence) if self._is_plain else self._match(sequence)

    def match_beyond(self, sequence: Sequence, tiers: KVTiers, *, with_disk: bool) -> PrefixMatch:
        """Returns what the device and the tiers behind it hold, as long as host memory has room for what must be
        fetched beside what it already holds of the prefix."""
        return self._match(sequence, tiers, with_disk)

    def _match(self, sequence: Sequence, tiers: KVTiers | None = None, with_disk: bool = False) -> PrefixMatch:
        groups, block_size = self._layout.groups, self._layout.block_size
        disk = tiers.disk if tiers is not None and with_disk else None
        chain = self._chains.of(sequence)
        rows: list[list[int | Kept | Found | None]] = []
        ends = [0]  # lengths, in blocks, that every group can serve
        num_known = 0  # the longest that all groups but those of states can serve
        run_starts = [0] * len(groups)  # where the unbroken run of present blocks that ends here began
        for index in range((len(sequence.tokens) - 1) // block_size):
            node, entry = self._named(chain, index + 1, sequence)
            row: list[int | Kept | Found | None] = [None] * len(groups)
            serves_all = has_states = True
            for number, group in enumerate(groups):
                where: int | Kept | Found | None = None if entry is None else entry.blocks[number]
                if where is None and tiers is not None:
                    where = tiers.host.find(node, number)
                    node = node if where is None else _adopt(chain, index + 1, where.node)
                if where is None and disk is not None:
                    where = disk.find(node, number)
                row[number] = where
                if group.is_state:
                    has_states = has_states and where is not None
                    continue
                if where is None:
                    serves_all = serves_all and group.window is not None
                    run_starts[number] = index + 1
                if group.window is not None:
                    # The last block itself is always asked for: a window of one token would match without evidence.
                    first_needed = min(index, self.first_needed(group, (index + 1) * block_size))
                    serves_all = serves_all and run_starts[number] <= first_needed
                elif where is None:
                    break  # a full group misses a block: nothing longer can be served
            else:
                rows.append(row)
                if serves_all:
                    num_known = index + 1
                    ends += [index + 1] if has_states else []
                continue
            break
        if disk is not None and tiers is not None and ends[-1]:
            ends = self._ends_with_room(ends, rows, tiers)
        return self._matched(rows[: ends[-1]], chain, num_known)

    def _ends_with_room(
        self, ends: list[int], rows: list[list[int | Kept | Found | None]], tiers: KVTiers
    ) -> list[int]:
        """Returns those of the ends for which host memory can hold at once all that comes from it and through it."""
        for number, group in enumerate(self._layout.groups):
            fetched, held = [0], [0]  # up to each place
            for row in rows[: ends[-1]]:
                fetched.append(fetched[-1] + isinstance(row[number], Found))
                held.append(held[-1] + isinstance(row[number], Kept))
            if not fetched[-1]:
                continue
            room = tiers.fetch_room(number)
            firsts = [self.first_needed(group, end * self._layout.block_size) for end in ends]
            ends = [
                end
                for end, first in zip(ends, firsts, strict=True)
                if fetched[end] == fetched[first] or fetched[end] - fetched[first] + held[end] - held[first] <= room
            ]
        return ends

    def _matched(
        self, rows: list[list[int | Kept | Found | None]], chain: list[PrefixNode], num_known: int
    ) -> PrefixMatch:
        num_tokens = len(rows) * self._layout.block_size
        tables: list[tuple[int | None, ...]] = []
        states: list[int | None] = []
        loads: list[MatchedLoad] = []
        fetched: list[tuple[int, MatchedFetch]] = []
        for number, group in enumerate(self._layout.groups):
            first = self.first_needed(group, num_tokens)
            table: list[int | None] = [None] * len(rows)
            for index in range(first, len(rows)):
                where = rows[index][number]
                if isinstance(where, Kept):
                    loads.append(MatchedLoad(number, index, where))
                elif isinstance(where, Found):
                    fetched.append((index, MatchedFetch(chain[index + 1], number, where)))
                else:
                    table[index] = where
            if group.is_state:
                states += table[-1:]
                table = [None for place in table[-1:] if place is None]
            tables.append(tuple(table))
        fetches = tuple(fetch for _, fetch in sorted(fetched, key=itemgetter(0)))
        known = num_known * self._layout.block_size if self._has_blocks and self._has_states else 0
        return PrefixMatch(num_tokens, tuple(tables), tuple(states), known, tuple(loads), fetches)

    def _match_in_full(self, sequence: Sequence) -> PrefixMatch:
        """Returns what the device holds, for models without windows and states: blocks as long as every group has them.
        A prompt of a thousand tokens waits for this loop."""
        block_size, find, chain = self._layout.block_size, self._index.find, self._chains.of(sequence)
        found: list[list[int | None]] = []
        for index in range(1, (len(sequence.tokens) - 1) // block_size + 1):
            if index == len(chain):
                self._chains.extend(chain, sequence)
            entry = find(chain[index])
            if entry is None:
                break
            chain[index] = entry.node
            if None in entry.blocks:
                break
            found.append(entry.blocks)
        tables = tuple(tuple(blocks[number] for blocks in found) for number in range(len(self._layout.groups)))
        return PrefixMatch(len(found) * block_size, tables)

    def _named(self, chain: list[PrefixNode], place: int, sequence: Sequence) -> tuple[PrefixNode, PrefixEntry | None]:
        if place == len(chain):
            self._chains.extend(chain, sequence)
        entry = self._index.find(chain[place])
        if entry is not None:
            chain[place] = entry.node
        return chain[place], entry


def _adopt(chain: list[PrefixNode], place: int, node: PrefixNode) -> PrefixNode:
    """Puts a node that names the same prefix into the chain. Chains that share nodes are compared in one step."""
    chain[place] = node
    if place + 1 < len(chain):
        chain[place + 1].parent = node
    return node
