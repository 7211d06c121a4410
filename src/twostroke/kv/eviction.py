"""What happens to a block when its space is needed: whoever remembers it is told, and tiers may keep it."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.prefix_memory import PrefixMemory
from twostroke.kv.tiers.tiers import KVTiers


def eviction(
    index: PrefixIndex, group: int, memory: PrefixMemory | None, tiers: KVTiers | None
) -> Callable[[int], None]:
    """Told of blocks of a group. It knows no ledger: a cycle of references would wait for the collector."""

    def on_evict(block: int) -> None:
        if (entry := index.entry_of(group, block)) is not None:
            if memory is not None:
                memory.lost(entry.node)
            if tiers is not None:
                tiers.offer(entry.node, group, block)
        index.remove(group, block)

    return on_evict
