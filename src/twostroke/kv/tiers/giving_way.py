"""Which lease ends before its time, where all slots that may be leased are: nobody can pin them for long by asking for
prompts to be read that nobody takes. Knows leases; ends none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twostroke.kv.tiers.peers import Lease

UNASKED_S, FRESH_S = 10.0, 2.0
"""Whoever is to take a lease comes within milliseconds, and says every 5 s that it waits. One of which nothing was
heard for the first of these gives way to anybody; for the second, to whoever has fewer slots."""


def who_gives_way(
    leases: Collection[Lease], newcomer: Lease, group: int, now_s: float, is_read: Callable[[str], bool]
) -> Lease | None:
    """Of leases that were granted and that nobody has asked for, the oldest that may end for a slot of this group: one
    that has lasted, or of a tenant that has more slots than the newcomer's would. None: the newcomer gets none.
    `is_read`: whether somebody reads the lease of this name now, who may not have said yet that he waits for it."""
    held: Counter[str] = Counter()
    for lease in leases:
        held[lease.tenant] += len(lease.kept[group])
    own = held[newcomer.tenant] + 1
    may_end = [
        one
        for one in leases
        if one.granted_s is not None
        and not one.is_asked
        and one.kept[group]
        and now_s - one.granted_s > (FRESH_S if held[one.tenant] > own else UNASKED_S)
        and not is_read(one.lease_id)
    ]
    return min(may_end, key=lambda one: one.granted_s or 0.0, default=None)
