"""The proof behind `ledger.check()`: no block lost, none shared wrongly, the index true. It reads, and changes nothing.
Quadratic in places: for tests and for idle moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from twostroke.core.kv_layout import KVGroup
from twostroke.core.sequence import Sequence
from twostroke.kv.block_pool import ConservationError

if TYPE_CHECKING:
    from twostroke.kv.holding import Holding
    from twostroke.kv.ledger import KVLedger
    from twostroke.kv.snapshots import Snapshots


def check(ledger: KVLedger, running: list[Sequence], holdings: Mapping[int, Holding]) -> None:
    expected, actual = {sequence.seq_id for sequence in running}, set(holdings)
    if expected != actual:
        raise ConservationError(
            f"sequences {sorted(actual - expected)} hold blocks and do not run; "
            f"sequences {sorted(expected - actual)} run and hold none"
        )
    for number, pool in enumerate(ledger.pools):
        tables = [(sequence, holdings[sequence.seq_id].tables[number]) for sequence in running]
        held = Counter(block for _, table in tables for block in table if block is not None)
        if ledger.states is not None and number in ledger.states.numbers:
            held += ledger.states.held(number)
        try:
            pool.check(held)
            _check_sharing(ledger, number, tables)
        except ConservationError as error:
            raise ConservationError(f"KV group {number}: {error}") from None
    for sequence in running:
        _check_tables(ledger, sequence, holdings[sequence.seq_id])
        if ledger.states is not None:
            _check_dues(ledger, sequence, ledger.states)
    _check_index(ledger)
    if ledger.tiers is not None:
        ledger.tiers.check()


def _check_dues(ledger: KVLedger, sequence: Sequence, states: Snapshots) -> None:
    """Snapshots that were not taken yet lie ahead, in order, and nobody can find them."""
    dues, name = states.keeping(sequence).dues, f"sequence {sequence.seq_id}"
    lengths = [due.length for due in dues]
    if lengths != sorted(set(lengths)) or any(length % ledger.layout.block_size for length in lengths):
        raise ConservationError(f"{name} is to have snapshots behind {lengths} tokens")
    if lengths and lengths[0] <= sequence.num_computed:
        raise ConservationError(
            f"{name} has computed {sequence.num_computed} positions, and no snapshot at {lengths[0]}"
        )
    for due in dues:
        for number, slot in zip(states.numbers, due.slots, strict=True):
            if ledger.pools[number].is_findable(slot):
                raise ConservationError(f"{name}: snapshot {slot} of KV group {number} is found before it is taken")


def _check_tables(ledger: KVLedger, sequence: Sequence, holding: Holding) -> None:
    """Every position that is launched has a block, every key that may still be read is held, nothing else is."""
    block_size = ledger.layout.block_size
    due = [(holding.num_committed + 1) * block_size]  # and of each window, when the first block held falls behind it
    for group, first in zip(ledger.layout.groups, holding.first_held, strict=True):
        due += [] if group.window is None else [(first + 1) * block_size + group.window - 1]
    if holding.commits_at != min(due) or sequence.num_computed >= holding.commits_at:
        raise ConservationError(
            f"sequence {sequence.seq_id} has computed {sequence.num_computed} positions and committed "
            f"{holding.num_committed} blocks, and is to commit the next at {holding.commits_at}"
        )
    for number, (group, table) in enumerate(zip(ledger.layout.groups, holding.tables, strict=True)):
        name = f"sequence {sequence.seq_id}, KV group {number}"
        if len(table) < ledger.layout.entries_for(group, sequence.next_position) and not _waits(
            ledger, sequence, group
        ):
            raise ConservationError(f"{name}: {len(table)} blocks for {sequence.next_position} positions")
        if group.is_state and len(table) > 1:
            raise ConservationError(f"{name}: {len(table)} slots for one state")
        first_needed = 0 if group.window is None else max(0, sequence.num_computed - group.window + 1) // block_size
        for index, block in enumerate(table):
            if (block is None) != (index < first_needed):
                raise ConservationError(f"{name}: entry {index} is {block}, and entries from {first_needed} are needed")
        if not group.is_state and holding.end != len(table) * block_size:
            raise ConservationError(f"{name}: {len(table)} blocks, and positions below {holding.end} count as held")
        # Whose blocks are being loaded may have no row yet: nothing was granted, and nothing is in flight.
        begins = sequence.num_in_flight == 0 and sequence.num_computed == holding.num_committed * block_size
        begins = begins and ledger.tiers is not None
        granted, first = holding.num_granted[number], holding.first_held[number]
        if granted != len(table) and not (begins and granted == first):
            raise ConservationError(f"{name}: {granted} of {len(table)} entries were granted")


def _waits(ledger: KVLedger, sequence: Sequence, group: KVGroup) -> bool:
    """Whether its state lies in a snapshot yet: it has none of its own before its first step."""
    if not group.is_state or ledger.states is None or sequence.num_in_flight:
        return False
    return bool(ledger.states.keeping(sequence).sources)


def _check_sharing(ledger: KVLedger, number: int, tables: list[tuple[Sequence, list[int | None]]]) -> None:
    """A block in two tables is a full, committed block at the same place of the same prefix."""
    block_size = ledger.layout.block_size
    seen: dict[int, tuple[Sequence, int]] = {}
    for sequence, table in tables:
        for index, block in enumerate(table):
            if block is None:
                continue
            entry = ledger.index.entry_of(number, block)
            if entry is not None and ledger.layout.groups[number].is_state:
                raise ConservationError(f"slot {block} of sequence {sequence.seq_id} changes, and can be found")
            end = (index + 1) * block_size
            if entry is not None and list(entry.node.tokens) != sequence.tokens[end - block_size : end]:
                raise ConservationError(f"block {block} of sequence {sequence.seq_id} is indexed with other tokens")
            if entry is not None and sequence.num_computed < end:
                raise ConservationError(f"block {block} of sequence {sequence.seq_id} is indexed before it is computed")
            if block not in seen:
                seen[block] = (sequence, index)
                continue
            other, other_index = seen[block]
            both = f"block {block} is shared by sequences {other.seq_id} and {sequence.seq_id}"
            if ledger.layout.groups[number].is_state:
                raise ConservationError(f"{both}, and holds the state of one")
            if other_index != index:
                raise ConservationError(f"{both} at entries {other_index} and {index}")
            if min(sequence.num_computed, other.num_computed) < end:
                raise ConservationError(f"{both} and is not computed by both")
            if sequence.tokens[:end] != other.tokens[:end]:
                raise ConservationError(f"{both}, whose tokens differ before position {end}")


def _check_index(ledger: KVLedger) -> None:
    placed = [0] * len(ledger.pools)
    for entry in ledger.index.entries():
        if all(block is None for block in entry.blocks):
            raise ConservationError(f"the index keeps an entry without a block for tokens {entry.node.tokens}")
        for number, block in enumerate(entry.blocks):
            if block is None:
                continue
            placed[number] += 1
            if not ledger.pools[number].is_findable(block) or ledger.index.entry_of(number, block) is not entry:
                raise ConservationError(f"KV group {number}: the index points to block {block}, which is not its own")
    for number, pool in enumerate(ledger.pools):
        findable = sum(pool.is_findable(block) for block in range(pool.num_blocks))
        if findable != placed[number]:
            raise ConservationError(f"KV group {number}: {findable} blocks are findable, {placed[number]} are indexed")
