"""KVLedger is the scheduler's only way to KV space: match, begin, reserve, commit, release, check. It keeps one pool
for each KV group, one block table for each group and running sequence, and the prefix index over them. Touches no
tensor.

A layer that keeps a state of fixed size has a group of slots. A sequence has one slot, which it takes with its first
blocks and gives back with them. A state does not tell what it was some tokens ago. So a prefix is found again only
where a snapshot was taken, in one more slot of the group (`snapshots.py`).

Blocks may be reused as soon as they are released, even while a launched step still reads or writes them: a backend runs
steps in launch order, so a block's next owner cannot touch it before that step is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twostroke.core.handoff import Handoff
from twostroke.core.kv_layout import KVLayout
from twostroke.core.sequence import Sequence
from twostroke.core.step import BlockCopy, BlockGrant, Step
from twostroke.core.timing import PrefixBreak
from twostroke.kv.block_map import BlockRun, group_runs, slot_runs
from twostroke.kv.block_pool import BlockPool
from twostroke.kv.eviction import eviction
from twostroke.kv.handing import Handing
from twostroke.kv.holding import Holding, LookAhead, max_total_tokens, num_shared
from twostroke.kv.matching import PrefixMatch, PrefixMatcher
from twostroke.kv.prefix_chains import PrefixChains
from twostroke.kv.prefix_index import Digest, PrefixIndex
from twostroke.kv.prefix_memory import PrefixMemory
from twostroke.kv.recall import coming_back, recalled
from twostroke.kv.snapshots import SNAPSHOT_TOKENS, Snapshots
from twostroke.kv.tiers.tiers import KVTiers

_ANY_LENGTH = 1 << 62
"""A number of positions that no sequence reaches. A state has room for all positions of its sequence."""


class KVLedger:
    def __init__(
        self,
        layout: KVLayout,
        *,
        prefix_caching: bool = True,
        key: bytes | None = None,
        digest: Digest | None = None,
        explains: bool = True,
        tiers: KVTiers | None = None,
        snapshot_tokens: int = SNAPSHOT_TOKENS,
    ) -> None:
        """`explains`: remember what was cached, so that `prefix_break` can say why a prompt was not found. `tiers`:
        take the blocks that the device gives up. `snapshot_tokens`: how far apart two snapshots of a sequence's states
        are."""
        self.layout = layout
        self.index = PrefixIndex(len(layout.groups), key=key, digest=digest)
        self.tiers = tiers
        self._memory = PrefixMemory() if explains else None
        self.pools = tuple(
            BlockPool(group.num_blocks, self._evicted(number)) for number, group in enumerate(layout.groups)
        )
        self._chains = PrefixChains(self.index, self._memory, layout.block_size, prefix_caching=prefix_caching)
        self._matcher = PrefixMatcher(layout, self.index, self._chains)
        self._first_needed = self._matcher.first_needed
        self.ahead = LookAhead(layout, self.pools, self._first_needed)
        """Counts the blocks that are still to be taken, for admission."""
        self._of_tokens = tuple(number for number, group in enumerate(layout.groups) if not group.is_state)
        self.states: Snapshots | None = None
        """None means that there is no group of states."""
        if len(self._of_tokens) < len(layout.groups):
            self.states = Snapshots(layout, self.pools, self.index, self._chains, snapshot_tokens)
        self._windowed = [(number, group) for number, group in enumerate(layout.groups) if group.window is not None]
        self._holdings: dict[int, Holding] = {}
        self.handing = self._handing()
        """Prompts that come from other engines or go to them. None means that there are none."""

    def _handing(self) -> Handing | None:
        if self.tiers is None or self.tiers.peers is None:
            return None
        return Handing(self.layout, self.index, self._chains, self._matcher, self.tiers, self.tiers.peers)

    def _evicted(self, number: int) -> Callable[[int], None]:
        memory = None if self.layout.groups[number].is_state else self._memory
        return eviction(self.index, number, memory, self.tiers)

    @property
    def max_total_tokens(self) -> int | None:
        """The most tokens that one sequence alone can grow to. None means no limit: every group has a window that
        fits."""
        return max_total_tokens(self.layout)

    # Finding

    def match(self, sequence: Sequence) -> PrefixMatch:
        """Returns the longest prefix that every group can serve from the device. It is always at least one token short
        of the known tokens, so that something is left to compute."""
        return self._matcher.match(sequence)

    def recall(self, sequence: Sequence, match: PrefixMatch) -> PrefixMatch | None:
        """Returns the same match, or a longer one with what tiers have, if loading that pays. None means that some of
        it is on its way from disk to host memory; `tiers.is_fetching` says until when."""
        return match if self.tiers is None else recalled(self._matcher, self.tiers, sequence, match)

    def prefix_break(self, sequence: Sequence, match: PrefixMatch) -> PrefixBreak | None:
        """Returns where the prompt stopped matching what is cached, and why. None means that it did not, or that it was
        not to be looked for."""
        if match.num_known > match.num_tokens and self._chains.is_shared(sequence):
            return PrefixBreak(match.num_tokens, "state", match.num_known - match.num_tokens)
        return self._chains.prefix_break(sequence, match.num_tokens)

    # Taking and giving back

    def begin(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Opens the sequence's tables with the matched blocks."""
        for pool, table in zip(self.pools, match.tables, strict=True):
            for block in table:
                if block is not None:
                    pool.retain(block)
        first_held = [
            0 if group.is_state else self._first_needed(group, match.num_tokens) for group in self.layout.groups
        ]
        num_committed = match.num_tokens // self.layout.block_size
        tables = tuple(list(table) for table in match.tables)
        if match.loads:
            self._load(sequence, match, tables)
        holding = Holding(tables, first_held, list(first_held), num_committed)
        holding.end = match.num_tokens
        holding.commits_at = self._next_commit(holding)
        if self.states is not None:
            self.states.begin(sequence, match)
        self._holdings[sequence.seq_id] = holding

    def _load(self, sequence: Sequence, match: PrefixMatch, tables: tuple[list[int | None], ...]) -> None:
        """Takes blocks of the device for what host memory has. They count as computed, and can be found: a backend runs
        copies in launch order, too, and a step waits for those that it reads."""
        assert self.tiers is not None
        for load in match.loads:
            self.tiers.host.pin(load.kept)  # before room is made: what the device gives up must not take its slot
        chain = self._chains.of(sequence)
        for number, index, kept in match.loads:
            block = self.pools[number].allocate()
            self.tiers.load(kept, block)
            if self.layout.groups[number].is_state:
                tables[number][0] = block  # its own slot: it changes with the next token; host memory keeps its copy
                continue
            tables[number][index] = block
            entry = self.index.find_or_add(chain[index + 1])
            if entry is None:
                continue  # a collision: this block stays private
            chain[index + 1] = entry.node
            if self._memory is not None:
                self._memory.saw(entry.node)
            if entry.blocks[number] is None:
                self.index.place(entry, number, block)
                self.pools[number].mark_findable(block)

    def room(self, sequence: Sequence) -> int:
        """Returns the position up to which `reserve` would succeed now."""
        rooms, block_size = [], self.layout.block_size
        holding = self._holdings[sequence.seq_id]
        for number, (group, table) in enumerate(zip(self.layout.groups, holding.tables, strict=True)):
            entries = len(table) + self._available(sequence, number)
            rooms.append(entries * block_size if not group.is_state else _ANY_LENGTH if entries else 0)
        return min(rooms)

    def reserve(self, sequence: Sequence, end: int) -> tuple[BlockGrant, ...] | None:
        """Takes blocks for every position below `end`, and returns those that the backend has not been told of yet.
        Returns None, and takes nothing, if there are too few."""
        holding = self._holdings[sequence.seq_id]
        if end <= holding.end:
            return ()
        wanted = self.layout.blocks_for(end)
        lacking = []
        for number, (group, table) in enumerate(zip(self.layout.groups, holding.tables, strict=True)):
            lacking.append((1 if group.is_state else wanted) - len(table))
            if lacking[-1] > self._available(sequence, number):
                return None
        holding.end = wanted * self.layout.block_size
        grants: list[BlockGrant] = []
        for number, (table, pool) in enumerate(zip(holding.tables, self.pools, strict=True)):
            if lacking[number] > pool.num_available:
                table.append(self._borrow(sequence, number))
            else:
                table += pool.allocate_many(lacking[number])
            first = holding.num_granted[number]
            blocks = tuple(block for block in table[first:] if block is not None)
            holding.num_granted[number] = len(table)
            if blocks:
                grants.append(BlockGrant(sequence.seq_id, number, first, blocks))
        if self.states is not None:
            self.states.open(sequence, holding.tables)
        return tuple(grants)

    def _available(self, sequence: Sequence, number: int) -> int:
        """Returns how many blocks of a group a running sequence could take."""
        available = self.pools[number].num_available
        if available or self.states is None or number in self._of_tokens:
            return available
        return int(self.states.lent(sequence, number) is not None)

    def _borrow(self, sequence: Sequence, number: int) -> int:
        """Gives a sequence the snapshot that its state begins from as its own slot, since no other is left. The
        snapshot can be found no more."""
        assert self.states is not None
        slot = self.states.lent(sequence, number)
        assert slot is not None
        if self.pools[number].is_findable(slot):
            self._evicted(number)(slot)
            self.pools[number].mark_lost(slot)
        return slot

    def commit(self, sequence: Sequence) -> None:
        """Takes note that the KV of positions below `num_computed` is written. Enters the new full blocks, and the
        snapshots that were due so far, in the index, and releases blocks behind the window. Queries in flight and to
        come are all at `num_computed` or later."""
        holding = self._holdings[sequence.seq_id]
        if sequence.num_computed < holding.commits_at:
            return
        self._enter(sequence, holding, sequence.num_computed // self.layout.block_size)
        if self.states is not None:
            self.states.settle(sequence)
        if sequence.request.lease_id and self.handing is not None:
            self.handing.copy(sequence, holding.tables)
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
        chain, memory, prefixes = self._chains.of(sequence), self._memory, self.index
        groups = tuple([(number, holding.tables[number], self.pools[number]) for number in self._of_tokens])
        for index in found:
            if index + 1 == len(chain):
                self._chains.extend(chain, sequence)
            node = chain[index + 1]
            if not groups:
                continue  # all groups are of states: a node is entered only where a snapshot is taken
            entry = prefixes.find_or_add(node)
            if entry is None:
                continue  # a collision: this block stays private
            if entry.node is not node:
                chain[index + 1] = entry.node
            elif memory is not None:
                memory.saw(node)
            for number, table, pool in groups:
                block = table[index]
                if block is not None and entry.blocks[number] is None:
                    prefixes.place(entry, number, block)
                    pool.mark_findable(block)

    def _slide(self, holding: Holding, number: int, first_needed: int) -> None:
        table = holding.tables[number]
        for index in range(holding.first_held[number], first_needed):
            block = table[index]
            assert block is not None
            self.pools[number].release(block)
            table[index] = None
            holding.first_held[number] = index + 1

    @property
    def is_leasing(self) -> bool:
        """Whether KV is kept for another engine, or comes from one."""
        return self.tiers is not None and self.tiers.peers is not None and self.tiers.peers.is_busy

    def hand_on(self, sequence: Sequence, *, went_well: bool) -> Handoff | None:
        """Returns what another engine, which takes this prompt, is told. Called before the sequence ends."""
        holding = self._holdings.get(sequence.seq_id)
        tables = None if holding is None else holding.tables
        return None if self.handing is None else self.handing.end(sequence, tables, went_well=went_well)

    def release(self, sequence: Sequence, *, tainted: bool = False) -> None:
        """Gives back every block. What is in the index can be found until it is evicted, unless its content is
        `tainted`: then no other sequence may find it."""
        holding = self._holdings.pop(sequence.seq_id)
        for number, (table, pool) in enumerate(zip(holding.tables, self.pools, strict=True)):
            held = [block for block in table[holding.first_held[number] :] if block is not None]
            held.reverse()
            pool.release_many(held)
        if self.states is not None:
            self.states.end(sequence)
        if tainted:
            self.taint(sequence)

    def taint(self, sequence: Sequence) -> None:
        """Lets no other sequence find what this one wrote. That includes blocks that it no longer holds: those that
        have fallen behind a window, or were written before a preemption."""
        for node in self._chains.of(sequence)[1:]:
            if self.tiers is not None:
                self.tiers.forget(node)
            if (entry := self.index.find(node)) is None:
                continue
            for number, block in enumerate(tuple(entry.blocks)):
                if block is not None:
                    self.index.remove(number, block)
                    self.pools[number].mark_lost(block)

    def taint_ended(self, failed: Iterable[Sequence]) -> None:
        """Taints those of the failed sequences that had ended and were retired before the fault was known. Their chains
        are made again for that."""
        for sequence in failed:
            if sequence.is_finished:
                chain = self._chains.of(sequence)
                while len(chain) <= len(sequence.tokens) // self.layout.block_size:
                    self._chains.extend(chain, sequence)
                self.taint(sequence)
                self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Drops what was kept for a sequence's return, once it is finished and released."""
        self._chains.forget(sequence)

    def clear_prefixes(self) -> None:
        """Forgets every block that nobody holds, in every tier. A prefix is then found only where a running sequence
        has it."""
        if self.tiers is not None:
            self.tiers.is_open = False  # what is forgotten now is not to be kept
        for pool in self.pools:
            pool.evict_cached()
        if self._memory is not None:
            self._memory.clear()
        if self.tiers is not None:
            self.tiers.is_open = True
            self.tiers.clear()
        if self.index.listener is not None and not len(self.index):
            self.index.listener.cleared()

    # Copies between the device and host memory

    def copies(self, step_id: int) -> tuple[tuple[BlockCopy, ...], tuple[BlockCopy, ...]]:
        """Returns the spills and loads that the next step carries."""
        return ((), ()) if self.tiers is None else self.tiers.launch(step_id)

    def copies_failed(self, step: Step, *, launched: bool) -> set[int]:
        """Called when a step raised: its copies may not have been made. If it was never launched, the next step makes
        its loads. Returns the sequences that hold a block which was to be loaded, and may not have been."""
        if self.tiers is None:
            return set()
        lost = {(group, block) for group, block, _ in self.tiers.failed(step, launched=launched)}
        for group, block in lost:
            if self.pools[group].is_findable(block):
                self.index.remove(group, block)
                self.pools[group].mark_lost(block)
        return {
            seq_id
            for seq_id, holding in self._holdings.items()
            if lost and any((group, block) in lost for group, table in enumerate(holding.tables) for block in table)
        }

    # Looking ahead, for admission

    def blocks_to_come(self, sequence: Sequence, end: int, max_chunk: int) -> list[int]:
        """Returns, for each group, how many blocks a running sequence will still take to be computed up to `end`."""
        return self.ahead.blocks_to_come(self._holdings[sequence.seq_id], end, max_chunk)

    def num_shared(self, sequence: Sequence) -> int:
        """Returns how many tokens at the beginning of a running sequence are in blocks that others hold, too, in every
        group, up to its last snapshot. If the sequence loses its own blocks, these stay."""
        block_size = self.layout.block_size
        shared = num_shared(self._holdings[sequence.seq_id], self._of_tokens, self.pools) * block_size
        if self.states is not None:
            shared = min(shared, self.states.keeping(sequence).last // block_size * block_size)
        return min(shared, len(sequence.tokens) - 1)

    def num_coming_back(self, sequence: Sequence) -> tuple[int, float]:
        """Returns how many tokens of a running sequence need not be computed again if it loses its blocks, and the
        predicted seconds to load them. They are those that others hold, too, and those behind them that tiers hold, if
        loading these pays."""
        shared = self.num_shared(sequence)
        if self.tiers is None or self.states is not None:
            return shared, 0.0
        return coming_back(self.tiers, sequence, self._chains.of(sequence), shared, self.layout.block_size)

    # Looking on

    def block_runs(self) -> tuple[list[BlockRun], ...]:
        """Returns, for each group, every block, as runs of neighbours of the same kind and holder."""
        tables = {seq_id: holding.tables for seq_id, holding in self._holdings.items()}
        return tuple(group_runs(number, pool, tables, self.states) for number, pool in enumerate(self.pools))

    def slot_runs(self) -> tuple[list[BlockRun], ...]:
        """Returns, for each group, every slot of host memory as such runs. It is empty if there are no tiers."""
        return () if self.tiers is None else tuple(slot_runs(self.tiers, group) for group in range(len(self.pools)))

    # Proof

    def holding(self, sequence: Sequence) -> Holding | None:
        return self._holdings.get(sequence.seq_id)

    def check(self, running: Iterable[Sequence]) -> None:
        """Proves conservation, given every sequence that holds blocks. Raises ConservationError."""
        from twostroke.kv.conservation import check

        check(self, list(running), self._holdings)
