"""KVLedger: the scheduler's only door to KV space: match, begin, reserve, commit, release, check. It keeps one pool a
KV group and one block table a group and running sequence, and the prefix index over them. Touches no tensor.

A layer that keeps a state of fixed size has a group of slots: one a sequence, taken with its first blocks, given back
with them. What a state was some tokens ago cannot be read from it, so beside such a group no prefix is found again. A
snapshot would be one more slot, placed in the index at the block where it was taken, and copied at `begin`.

Blocks may be reused as soon as they are released, even while a launched step still reads or writes them: a backend runs
steps in launch order, so a block's next owner cannot touch it before that step is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.sequence import Sequence
from twostroke.core.step import BlockGrant
from twostroke.core.timing import PrefixBreak
from twostroke.kv.block_pool import BlockPool
from twostroke.kv.prefix_chains import PrefixChains
from twostroke.kv.prefix_index import Digest, PrefixEntry, PrefixIndex
from twostroke.kv.prefix_memory import PrefixMemory

_ANY_LENGTH = 1 << 62
"""More positions than any sequence has: a state has room for them all."""


@dataclass(slots=True)
class Holding:
    """What one running sequence holds. An entry of a table is None when its block lies behind the window."""

    tables: tuple[list[int | None], ...]
    first_held: list[int]
    """One a group: entries below it are None, all others are blocks."""
    num_granted: list[int]
    """One a group: entries the backend was told of."""
    num_committed: int
    """Full blocks that were matched, or whose KV is computed and was offered to the index."""
    end: int = 0
    """Positions below it have a block: nearly every step asks for one more position, and it is there."""
    commits_at: int = 0
    """`num_computed` from which on there is something to commit: a full block more, or one behind a window."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest reusable prefix. Good until the next change of the ledger."""

    num_tokens: int
    tables: tuple[tuple[int | None, ...], ...]


class KVLedger:
    def __init__(
        self,
        layout: KVLayout,
        *,
        prefix_caching: bool = True,
        key: bytes | None = None,
        digest: Digest | None = None,
        explains: bool = True,
    ) -> None:
        """`explains`: remember what was cached, so that `prefix_break` can say why a prompt was not found."""
        self.layout = layout
        self.index = PrefixIndex(len(layout.groups), key=key, digest=digest)
        self._memory = PrefixMemory() if explains else None
        self.pools = tuple(self._pool(number, group) for number, group in enumerate(layout.groups))
        self._chains = PrefixChains(self.index, self._memory, layout.block_size, prefix_caching=prefix_caching)
        self._has_states = any(group.is_state for group in layout.groups)
        self._windowed = [(number, group) for number, group in enumerate(layout.groups) if group.window is not None]
        self._holdings: dict[int, Holding] = {}

    def _pool(self, number: int, group: KVGroup) -> BlockPool:
        index, memory = self.index, self._memory

        def on_evict(block: int) -> None:  # without the ledger: a cycle of references would wait for the collector
            if memory is not None and (entry := index.entry_of(number, block)) is not None:
                memory.lost(entry.node)
            index.remove(number, block)

        return BlockPool(group.num_blocks, on_evict)

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens that one sequence alone can grow to; None: no bound, every group has a window that fits.
        The last token sampled is never an input, so its KV is never written."""
        block_size = self.layout.block_size
        bounds = [
            group.num_blocks * block_size + 1
            for group in self.layout.groups
            if not group.is_state and (group.window is None or group.num_blocks < self._blocks_spanned(group.window))
        ]
        return min(bounds, default=None)

    def _blocks_spanned(self, num_positions: int) -> int:
        """The most blocks that a run of consecutive positions can touch."""
        return self.layout.blocks_for(num_positions - 1) + 1

    def _first_needed(self, group: KVGroup, position: int) -> int:
        """The first table entry that a query at `position` or later can read."""
        if group.window is None:
            return 0
        return max(0, position - group.window + 1) // self.layout.block_size

    # Finding

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The longest prefix that every group can serve, always at least one token short of the known tokens, so that
        something is left to compute. A full group needs all of its blocks, a window only those still readable."""
        if self._has_states:
            return PrefixMatch(0, ((),) * len(self.pools))
        return self._match_windows(sequence) if self._windowed else self._match_in_full(sequence)

    def _match_windows(self, sequence: Sequence) -> PrefixMatch:
        groups, block_size = self.layout.groups, self.layout.block_size
        chain = self._chains.of(sequence)
        entries: list[PrefixEntry | None] = []
        best_blocks = 0
        run_starts = [0] * len(groups)  # where the unbroken run of present blocks that ends here began
        for index in range((len(sequence.tokens) - 1) // block_size):
            if index + 1 == len(chain):
                self._chains.extend(chain, sequence)
            entry = self.index.find(chain[index + 1])
            if entry is not None:
                chain[index + 1] = entry.node
            serves_all, is_over = entry is not None, False
            for number, group in enumerate(groups):
                if entry is None or entry.blocks[number] is None:
                    if group.window is None:
                        is_over = True  # a full group misses a block: nothing longer can be served
                        break
                    run_starts[number] = index + 1
                if group.window is not None:
                    # The last block itself is always asked for: a window of one token would match without evidence.
                    first_needed = min(index, self._first_needed(group, (index + 1) * block_size))
                    serves_all = serves_all and run_starts[number] <= first_needed
            if is_over:
                break
            entries.append(entry)
            if serves_all:
                best_blocks = index + 1
        firsts = [self._first_needed(group, best_blocks * block_size) for group in groups]
        tables = tuple(_matched_table(number, first, entries[:best_blocks]) for number, first in enumerate(firsts))
        return PrefixMatch(best_blocks * block_size, tables)

    def _match_in_full(self, sequence: Sequence) -> PrefixMatch:
        """The same where no group has a window: blocks as long as every group has them. A prompt of a thousand tokens
        waits for this loop."""
        block_size, find, chain = self.layout.block_size, self.index.find, self._chains.of(sequence)
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
        tables = tuple(tuple(blocks[number] for blocks in found) for number in range(len(self.pools)))
        return PrefixMatch(len(found) * block_size, tables)

    def prefix_break(self, sequence: Sequence, match: PrefixMatch) -> PrefixBreak | None:
        """Where the prompt left what is cached, and why; None where it did not, or was not to be found."""
        return self._chains.prefix_break(sequence, match.num_tokens)

    # Taking and giving back

    def begin(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Open the sequence's tables with the matched blocks."""
        for pool, table in zip(self.pools, match.tables, strict=True):
            for block in table:
                if block is not None:
                    pool.retain(block)
        first_held = [self._first_needed(group, match.num_tokens) for group in self.layout.groups]
        num_committed = match.num_tokens // self.layout.block_size
        tables = tuple(list(table) for table in match.tables)
        holding = Holding(tables, first_held, list(first_held), num_committed)
        holding.end = match.num_tokens
        holding.commits_at = self._next_commit(holding)
        self._holdings[sequence.seq_id] = holding

    def room(self, sequence: Sequence) -> int:
        """The position up to which `reserve` would succeed now."""
        rooms, block_size = [], self.layout.block_size
        tables = self._holdings[sequence.seq_id].tables
        for group, table, pool in zip(self.layout.groups, tables, self.pools, strict=True):
            entries = len(table) + pool.num_available
            rooms.append(entries * block_size if not group.is_state else _ANY_LENGTH if entries else 0)
        return min(rooms)

    def reserve(self, sequence: Sequence, end: int) -> tuple[BlockGrant, ...] | None:
        """Blocks for every position below `end`: all, and what the backend has not been told of yet; or None, and
        nothing is taken."""
        holding = self._holdings[sequence.seq_id]
        if end <= holding.end:
            return ()
        wanted = self.layout.blocks_for(end)
        lacking = []
        for group, table, pool in zip(self.layout.groups, holding.tables, self.pools, strict=True):
            lacking.append((1 if group.is_state else wanted) - len(table))
            if lacking[-1] > pool.num_available:
                return None
        holding.end = wanted * self.layout.block_size
        grants: list[BlockGrant] = []
        for number, (table, pool) in enumerate(zip(holding.tables, self.pools, strict=True)):
            table += pool.allocate_many(lacking[number])
            first = holding.num_granted[number]
            blocks = tuple(block for block in table[first:] if block is not None)
            holding.num_granted[number] = len(table)
            if blocks:
                grants.append(BlockGrant(sequence.seq_id, number, first, blocks))
        return tuple(grants)

    def commit(self, sequence: Sequence) -> None:
        """The KV of positions below `num_computed` is written: enter the new full blocks in the index, and release
        those behind the window. Queries in flight and to come are all at `num_computed` or later."""
        holding = self._holdings[sequence.seq_id]
        if sequence.num_computed < holding.commits_at:
            return
        self._enter(sequence, holding, sequence.num_computed // self.layout.block_size)
        for number, group in self._windowed:
            self._slide(holding, number, self._first_needed(group, sequence.num_computed))
        holding.commits_at = self._next_commit(holding)

    def _next_commit(self, holding: Holding) -> int:
        block_size = self.layout.block_size
        ends = [(holding.num_committed + 1) * block_size]
        for number, group in self._windowed:
            assert group.window is not None
            ends.append((holding.first_held[number] + 1) * block_size + group.window - 1)
        return min(ends)

    def _enter(self, sequence: Sequence, holding: Holding, num_full: int) -> None:
        found, holding.num_committed = range(holding.num_committed, num_full), num_full
        if self._has_states:
            return
        chain, memory = self._chains.of(sequence), self._memory
        for index in found:
            if index + 1 == len(chain):
                self._chains.extend(chain, sequence)
            node = chain[index + 1]
            entry = self.index.find_or_add(node)
            if entry is None:
                continue  # a collision: this block stays private
            if entry.node is not node:
                chain[index + 1] = entry.node
            elif memory is not None:
                memory.saw(node)
            for number, table in enumerate(holding.tables):
                block = table[index]
                if block is not None and entry.blocks[number] is None:
                    self.index.place(entry, number, block)
                    self.pools[number].mark_findable(block)

    def _slide(self, holding: Holding, number: int, first_needed: int) -> None:
        table = holding.tables[number]
        for index in range(holding.first_held[number], first_needed):
            block = table[index]
            assert block is not None
            self.pools[number].release(block)
            table[index] = None
            holding.first_held[number] = index + 1

    def release(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Give back every block. What is in the index stays findable until evicted, unless its content is `tainted`:
        then no other sequence may find it."""
        holding = self._holdings.pop(sequence.seq_id)
        for number, (table, pool) in enumerate(zip(holding.tables, self.pools, strict=True)):
            held = [block for block in table[holding.first_held[number] :] if block is not None]
            held.reverse()
            if tainted:
                for block in filter(pool.is_findable, held):
                    self.index.remove(number, block)
                    pool.mark_lost(block)
            pool.release_many(held)

    def retire(self, sequence: Sequence) -> None:
        """The sequence is finished and released: drop what was kept for its return."""
        self._chains.forget(sequence)

    def clear_prefixes(self) -> None:
        """Forget every block that nobody holds: a prefix is then found only where a running sequence has it."""
        for pool in self.pools:
            pool.evict_cached()
        if self._memory is not None:
            self._memory.clear()

    # Looking ahead, for admission

    def blocks_to_come(self, sequence: Sequence, end: int, max_chunk: int) -> list[int]:
        """One a group: blocks that a running sequence will still take to be computed up to `end`."""
        holding = self._holdings[sequence.seq_id]
        return [
            self._blocks_ahead(group, len(table), first, end, max_chunk)
            for group, table, first in zip(self.layout.groups, holding.tables, holding.first_held, strict=True)
        ]

    def shortage(self, match: PrefixMatch, end: int, max_chunk: int, spare: Iterable[int]) -> tuple[int, ...]:
        """One a group: blocks missing for a sequence that begins with `match` to be computed up to `end`, with `spare`
        blocks left. All 0: it fits."""
        short = []
        for group, pool, table, left in zip(self.layout.groups, self.pools, match.tables, spare, strict=True):
            ahead = self._blocks_ahead(group, len(table), self._first_needed(group, match.num_tokens), end, max_chunk)
            revived = sum(block is not None and pool.references(block) == 0 for block in table)
            short.append(max(0, ahead + revived + left - pool.num_available))
        return tuple(short)

    def _blocks_ahead(self, group: KVGroup, num_entries: int, first_held: int, end: int, max_chunk: int) -> int:
        """A window gives blocks back as it moves on, so it never takes more than it spans while a chunk is computed."""
        ahead = self.layout.entries_for(group, end) - num_entries
        if group.window is not None:
            ahead = min(ahead, self._blocks_spanned(group.window - 1 + max_chunk) - (num_entries - first_held))
        return max(0, ahead)

    # Proof

    def holding(self, sequence: Sequence) -> Holding | None:
        return self._holdings.get(sequence.seq_id)

    def check(self, running: Iterable[Sequence]) -> None:
        """Prove conservation, given every sequence that holds blocks; raises ConservationError."""
        from twostroke.kv.conservation import check

        check(self, list(running), self._holdings)


def _matched_table(number: int, first: int, entries: list[PrefixEntry | None]) -> tuple[int | None, ...]:
    return tuple(
        None if entry is None or index < first else entry.blocks[number] for index, entry in enumerate(entries)
    )
