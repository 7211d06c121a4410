"""What one running sequence holds of KV space, and what it will still take: plain counting over tables of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.kv.block_pool import BlockPool
from twostroke.kv.matching import PrefixMatch

_ANY_NUMBER = 1 << 40
"""More blocks than any sequence has."""


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
class LookAhead:
    """How many blocks are still to be taken, for admission."""

    layout: KVLayout
    pools: tuple[BlockPool, ...]
    first_needed: Callable[[KVGroup, int], int]

    def blocks_to_come(self, holding: Holding, end: int, max_chunk: int) -> list[int]:
        """One a group: what a running sequence will still take to be computed up to `end`."""
        return [
            self._blocks_ahead(group, len(table), first, end, max_chunk)
            for group, table, first in zip(self.layout.groups, holding.tables, holding.first_held, strict=True)
        ]

    def shortage(self, match: PrefixMatch, end: int, max_chunk: int, spare: Iterable[int]) -> tuple[int, ...]:
        """One a group: blocks missing for a sequence that begins with `match` to be computed up to `end`, with `spare`
        blocks left. All 0: it fits."""
        short = []
        parts = zip(self.layout.groups, self.pools, match.tables, spare, strict=True)
        for number, (group, pool, table, left) in enumerate(parts):
            ahead = self._blocks_ahead(group, len(table), self.first_needed(group, match.num_tokens), end, max_chunk)
            revived = sum(block is not None and pool.references(block) == 0 for block in table)
            short.append(max(0, ahead + revived + match.num_loads(number) + left - pool.num_available))
        return tuple(short)

    def samples_ahead(self, prompt_len: int, end: int, number: int) -> list[int]:
        """One a group: what `number` more samples of a prompt take up to `end`, beside what they share."""
        return [number * self._own_entries(group, prompt_len, end) for group in self.layout.groups]

    def most_samples(self, prompt_len: int, end: int) -> int:
        """Of one prompt, how many can be computed up to `end` at a time, if nobody else holds anything."""
        most = _ANY_NUMBER
        for group, pool in zip(self.layout.groups, self.pools, strict=True):
            own = self._own_entries(group, prompt_len, end)
            shared = self.layout.entries_for(group, end) - own
            if group.window is not None:
                spanned = blocks_spanned(self.layout, group.window)
                own, shared = min(own, spanned), min(shared, spanned)
            if own:
                most = min(most, (pool.num_blocks - shared) // own)
        return most

    def _own_entries(self, group: KVGroup, prompt_len: int, end: int) -> int:
        """Of a sample computed up to `end`: what it has beside the prompt's full blocks. A state is never shared."""
        shared = 0 if group.is_state else (prompt_len - 1) // self.layout.block_size
        return self.layout.entries_for(group, end) - shared

    def _blocks_ahead(self, group: KVGroup, num_entries: int, first_held: int, end: int, max_chunk: int) -> int:
        """A window gives blocks back as it moves on, so it never takes more than it spans while a chunk is computed."""
        ahead = self.layout.entries_for(group, end) - num_entries
        if group.window is not None:
            ahead = min(ahead, blocks_spanned(self.layout, group.window - 1 + max_chunk) - (num_entries - first_held))
        return max(0, ahead)


def blocks_spanned(layout: KVLayout, num_positions: int) -> int:
    """The most blocks that a run of consecutive positions can touch."""
    return layout.blocks_for(num_positions - 1) + 1


def max_total_tokens(layout: KVLayout) -> int | None:
    """The most tokens that one sequence alone can grow to; None: no bound, every group has a window that fits. The last
    token sampled is never an input, so its KV is never written."""
    bounds = [
        group.num_blocks * layout.block_size + 1
        for group in layout.groups
        if not group.is_state and (group.window is None or group.num_blocks < blocks_spanned(layout, group.window))
    ]
    return min(bounds, default=None)


def num_shared(holding: Holding, numbers: Iterable[int], pools: Series[BlockPool]) -> int:
    """Blocks at the beginning of a sequence that others hold, too, in each of these groups."""
    shared = []
    for number in numbers:
        table, pool = holding.tables[number], pools[number]
        alone = (index for index, block in enumerate(table) if block is not None and pool.references(block) < 2)
        shared.append(next(alone, len(table)))
    return min(shared, default=_ANY_NUMBER)
