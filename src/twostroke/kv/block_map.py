"""A group's blocks as a picture has them: runs of neighbours that are free, cached, or held by the same sequence; and
the slots of host memory that blocks go to. Reads the pool, the tables and the tiers; changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from twostroke.kv.block_pool import BlockPool
from twostroke.kv.snapshots import Snapshots
from twostroke.kv.tiers.tiers import KVTiers

BlockState = Literal["free", "cached", "used", "shared"]
"""Nobody has it; nobody has it and it can be found again; one sequence has it; several have."""
SlotState = Literal["free", "kept", "written", "moving"]
"""Of a slot in host memory. Nothing is there; a block is; a block is, and disk has it, too; a copy is under way."""

_FREE, _CACHED = -1, -2
NOBODY = -1


class BlockRun(NamedTuple):
    first: int
    length: int
    state: BlockState | SlotState
    seq_id: int
    """Who holds it, of several the one that began first; NOBODY: nobody does."""


def group_runs(
    number: int,
    pool: BlockPool,
    tables: Mapping[int, Sequence[Sequence[int | None]]],
    states: Snapshots | None,
) -> list[BlockRun]:
    """Of one group. `tables`: of each sequence, one a group; `states`: what sequences hold beside them."""
    own: dict[int, Sequence[int | None]] = {seq_id: every[number] for seq_id, every in tables.items()}
    if states is not None and number in states.numbers:
        own = {seq_id: [*table, *states.held_by(seq_id, number)] for seq_id, table in own.items()}
    return block_runs(pool, own)


def block_runs(pool: BlockPool, tables: Mapping[int, Sequence[int | None]]) -> list[BlockRun]:
    """`tables`: of each sequence its blocks, in the order in which sequences began. One pass over what is held, and one
    over all."""
    kinds = [_FREE] * pool.num_blocks  # of what is held: twice the sequence's id, and one more where it is shared
    for cached in pool.cached_blocks():
        kinds[cached] = _CACHED
    for seq_id, table in tables.items():
        for block in table:
            if block is not None and kinds[block] < 0:
                kinds[block] = 2 * seq_id + (pool.references(block) > 1)
    runs, first = [], 0
    for kind, same in groupby(kinds):
        length = len(list(same))
        runs.append(_run(first, length, kind))
        first += length
    return runs


def _run(first: int, length: int, kind: int) -> BlockRun:
    if kind < 0:
        return BlockRun(first, length, "free" if kind == _FREE else "cached", NOBODY)
    return BlockRun(first, length, "shared" if kind % 2 else "used", kind // 2)


def slot_runs(tiers: KVTiers, group: int) -> list[BlockRun]:
    """The same of this group's slots in host memory, in one pass over what is there, and one over all."""
    states: list[SlotState] = ["free"] * tiers.host.num_slots[group]
    disk = tiers.disk
    for kept in tiers.host.taken(group):
        is_written = disk is not None and disk.find(kept.node, group) is not None
        states[kept.slot] = "moving" if kept.pins else "written" if is_written else "kept"
    runs, first = [], 0
    for state, same in groupby(states):
        length = len(list(same))
        runs.append(BlockRun(first, length, state, NOBODY))
        first += length
    return runs
