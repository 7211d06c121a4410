"""Snapshots are copies of states as they were behind some of a prefix's blocks. They lie in slots beside those that
running sequences work in, and the prefix index names them at the block where they were taken. Decides where they are
taken, and says which copies a step makes for that. Touches no state.

The own slots of running sequences come first: a snapshot takes a slot that is left, if need be that of the least
recently used snapshot. Whether a step went well is known later. So a snapshot can be found once its sequence is
committed that far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.core.kv_layout import KVLayout
from twostroke.core.sequence import Sequence
from twostroke.core.step import DecodeSlot, StateRestore, StateSave
from twostroke.kv.block_pool import BlockPool
from twostroke.kv.matching import PrefixMatch
from twostroke.kv.prefix_chains import PrefixChains
from twostroke.kv.prefix_index import PrefixIndex, PrefixNode

SNAPSHOT_TOKENS = 128
"""The least number of tokens between two snapshots of a sequence. Each costs a copy of all its states, and in a prompt
one more chunk."""


class DueSave(NamedTuple):
    """A snapshot that launched steps are to take, and that nobody can find yet."""

    length: int
    slots: tuple[int, ...]
    """The slot in each group of states."""
    is_stop: bool
    """Whether others are likely to come back to it."""


@dataclass(slots=True)
class Keeping:
    """The snapshots that one running sequence begins from, takes and has taken."""

    last: int
    """The length of the longest of its prefixes that has a snapshot, or is to have one."""
    takes: bool
    """Whether anybody else could come back to its prefixes."""
    stops: tuple[int, ...] = ()
    """Lengths of its prompt, growing, behind which a snapshot is wanted. A chunk ends at each of them."""
    sources: tuple[int | None, ...] = ()
    """For each group, the snapshot that its state begins from, held until a step copies it. An entry is None if the
    sequence's own slot is loaded. Empty means that its states begin with nothing, or have begun."""
    dues: list[DueSave] = field(default_factory=list)
    """The snapshots that are due, by growing length."""
    passed: tuple[PrefixNode, tuple[int, ...]] | None = None
    """The node and slots of its latest snapshot, if that is no stop. The next snapshot makes it dispensable."""


class Snapshots:
    def __init__(
        self,
        layout: KVLayout,
        pools: Series[BlockPool],
        index: PrefixIndex,
        chains: PrefixChains,
        least_tokens: int = SNAPSHOT_TOKENS,
    ) -> None:
        self._block_size, self._index, self._chains = layout.block_size, index, chains
        self.numbers = tuple(number for number, group in enumerate(layout.groups) if group.is_state)
        self._pools = tuple(pools[number] for number in self.numbers)
        self._least_tokens = max(least_tokens, layout.block_size)
        self._restores: list[StateRestore] = []
        self._copied: list[tuple[int, int]] = []
        """Groups, and the snapshots in them that the next step restores from. They are held until the step is
        complete."""
        self._keepings: dict[int, Keeping] = {}

    # A sequence begins and ends

    def begin(self, sequence: Sequence, match: PrefixMatch) -> None:
        for pool, slot in zip(self._pools, match.states, strict=False):
            if slot is not None:
                pool.retain(slot)
        last = match.num_tokens
        is_wanted = sequence.request.sampling.n > 1 or bool(sequence.request.lease_id)  # siblings, or another engine
        takes = is_wanted or self._chains.is_shared(sequence)
        keeping = self._keepings[sequence.seq_id] = Keeping(last, takes, sources=match.states)
        if not takes:
            return
        stops = []
        if match.num_known - last >= self._least_tokens:
            # Everything but states was found up to here. So prompts part here, and the next one will, too.
            stops.append(last := match.num_known)
        last_full = (len(sequence.tokens) - 1) // self._block_size * self._block_size
        if last_full - last >= (self._block_size if is_wanted else self._least_tokens):
            stops.append(last_full)
        keeping.stops = tuple(stops)

    def lent(self, sequence: Sequence, number: int) -> int | None:
        """Returns the snapshot that a sequence begins from, if it may become the sequence's own slot: nobody else is
        about to read it."""
        place = self.numbers.index(number)
        source = next(iter(self._keepings[sequence.seq_id].sources[place : place + 1]), None)
        return source if source is not None and self._pools[place].references(source) == 1 else None

    def open(self, sequence: Sequence, tables: Series[list[int | None]]) -> None:
        """Called when a sequence has its own slots. The next step copies the snapshots that its states begin from into
        them."""
        keeping = self._keepings[sequence.seq_id]
        for number, source in zip(self.numbers, keeping.sources, strict=False):
            target = tables[number][0]
            if source is not None and target is not None and target != source:
                self._restores.append(StateRestore(sequence.seq_id, number, source, target))
                self._copied.append((number, source))
        keeping.sources = ()

    def end(self, sequence: Sequence) -> None:
        """Releases what a sequence held for snapshots. It is free then, or can be found by others as before."""
        keeping = self._keepings.pop(sequence.seq_id)
        for pool, source in zip(self._pools, keeping.sources, strict=False):
            if source is not None:
                pool.release(source)
        for due in keeping.dues:
            self._release(due.slots)

    def _release(self, slots: tuple[int, ...]) -> None:
        for pool, slot in zip(self._pools, slots, strict=True):
            pool.release(slot)

    # A step is chosen

    def chunk_end(self, sequence: Sequence, start: int, end: int) -> int:
        """Returns where a chunk that may reach `end` is to end: where a snapshot is wanted, or else at the end of a
        block, if there is one."""
        keeping = self._keepings[sequence.seq_id]
        if not keeping.takes:
            return end
        end = min(end, next((stop for stop in keeping.stops if stop > start), end))
        whole = end // self._block_size * self._block_size
        return whole if start < whole and end < sequence.prefill_len else end

    def of_chunk(self, sequence: Sequence, end: int) -> Iterable[StateSave]:
        """Returns what a step saves that has a chunk of this sequence up to `end`."""
        keeping = self._keepings[sequence.seq_id]
        if end % self._block_size or not keeping.takes:
            return ()
        is_stop = end in keeping.stops
        if not is_stop and end - keeping.last < self._least_tokens:
            return ()
        if self._is_known(sequence, end):
            keeping.last = end
            return ()
        return self._save(sequence, self._due(keeping, end, is_stop))

    def of_slot(self, sequence: Sequence, slot: DecodeSlot) -> Iterable[StateSave]:
        """Returns what a step saves that has a decode slot of this sequence. If drafts are in flight, it is not known
        where the slot begins."""
        keeping = self._keepings[sequence.seq_id]
        most = slot.position + slot.num_queries
        if keeping.dues:
            least = slot.position - (sequence.num_drafts_in_flight - (slot.num_queries - 1))
            for due in keeping.dues:
                if least < due.length <= most:
                    yield from self._save(sequence, due)
        if most < keeping.last + self._least_tokens or not keeping.takes:
            return
        # No step before this one can have come as far.
        length = max(slot.position + 1, keeping.last + self._least_tokens)
        length = -(-length // self._block_size) * self._block_size
        if length <= most:
            yield from self._save(sequence, self._due(keeping, length, is_stop=False))

    def _due(self, keeping: Keeping, length: int, is_stop: bool) -> DueSave | None:
        """Takes slots for a new snapshot. None means that a group has no slot left that could be taken."""
        if any(not pool.num_available for pool in self._pools):
            return None
        due = DueSave(length, tuple(pool.allocate() for pool in self._pools), is_stop)
        keeping.dues.append(due)
        keeping.last = length
        return due

    def _save(self, sequence: Sequence, due: DueSave | None) -> Iterable[StateSave]:
        if due is not None:
            for number, slot in zip(self.numbers, due.slots, strict=True):
                yield StateSave(sequence.seq_id, number, slot, due.length)

    def _is_known(self, sequence: Sequence, length: int) -> bool:
        chain = self._chains.of(sequence)
        while len(chain) <= length // self._block_size:
            self._chains.extend(chain, sequence)
        entry = self._index.find(chain[length // self._block_size])
        return entry is not None and all(entry.blocks[number] is not None for number in self.numbers)

    def restores(self) -> tuple[StateRestore, ...]:
        """Returns the restores of a complete step: what it copies into sequences' own slots. Later steps run behind it,
        so the snapshots that it copies from need not be held any longer."""
        restores = tuple(self._restores)
        for number, source in self._copied:
            self._pools[self.numbers.index(number)].release(source)
        self._restores, self._copied = [], []
        return restores

    # A step went well

    def settle(self, sequence: Sequence) -> None:
        """Called when a sequence's tokens up to `num_computed` are computed and named. Snapshots that were due up to
        there can be found from now on."""
        keeping = self._keepings[sequence.seq_id]
        while keeping.dues and keeping.dues[0].length <= sequence.num_computed:
            self._place(sequence, keeping, keeping.dues.pop(0))

    def _place(self, sequence: Sequence, keeping: Keeping, due: DueSave) -> None:
        chain, place = self._chains.of(sequence), due.length // self._block_size
        entry = self._index.find_or_add(chain[place])
        is_new = entry is not None and all(entry.blocks[number] is None for number in self.numbers)
        if entry is not None:  # else there was a collision: it stays private, and is of no use
            chain[place] = entry.node
            for number, pool, slot in zip(self.numbers, self._pools, due.slots, strict=True):
                if entry.blocks[number] is None:
                    self._index.place(entry, number, slot)
                    pool.mark_findable(slot)
        self._release(due.slots)
        self._outdate(keeping)
        keeping.passed = (chain[place], due.slots) if is_new and not due.is_stop else None

    def _outdate(self, keeping: Keeping) -> None:
        """Makes the snapshot before the latest one the first to be given up. A long prompt or answer has many, and the
        latest is of most use."""
        if keeping.passed is None:
            return
        node, slots = keeping.passed
        for number, pool, slot in zip(self.numbers, self._pools, slots, strict=True):
            entry = self._index.entry_of(number, slot)
            if entry is not None and entry.node is node:
                pool.make_stalest(slot)

    # Proof

    def keeping(self, sequence: Sequence) -> Keeping:
        return self._keepings[sequence.seq_id]

    def held(self, number: int) -> Counter[int]:
        """Counts the slots of a group that are held for snapshots, beside sequences' own."""
        found = Counter(source for group, source in self._copied if group == number)
        for seq_id in self._keepings:
            found.update(self.held_by(seq_id, number))
        return found

    def held_by(self, seq_id: int, number: int) -> list[int]:
        """Returns the slots of a group that one sequence holds for snapshots: those that are due, and the one that it
        begins from."""
        keeping, place = self._keepings[seq_id], self.numbers.index(number)
        sources = [source for source in keeping.sources[place : place + 1] if source is not None]
        return [due.slots[place] for due in keeping.dues] + sources
