"""Who holds how many of the running slots, and who gives one away to a tenant that holds fewer, or to a call that has
none: else the long answers of one would keep everybody else waiting to their end. Requests without a call neither give
nor take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from twostroke.core.sequence import Sequence

AGAIN_AFTER_TOKENS = 64
"""A stream that was sent away once gives way only when it has gone on by as many tokens: what it loses each time has to
be computed again."""


class Shares:
    def __init__(self) -> None:
        self._by_tenant: Counter[str] = Counter()
        self._by_call: dict[str, Counter[str]] = {}  # by tenant, of those that hold any

    def add(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.call:
            self._by_tenant[request.tenant] += 1
            self._by_call.setdefault(request.tenant, Counter())[request.call] += 1

    def remove(self, sequence: Sequence) -> None:
        request = sequence.request
        if not request.call:
            return
        _take_one(self._by_tenant, request.tenant)
        calls = self._by_call[request.tenant]
        _take_one(calls, request.call)
        if not calls:
            del self._by_call[request.tenant]

    def has_slot(self, tenant: str, call: str) -> bool:
        """Whether something of it runs; what belongs to no call never counts."""
        calls = self._by_call.get(tenant)
        return calls is not None and calls[call] > 0

    def who_gives_way(self, head: Sequence, youngest_first: Iterator[Sequence]) -> Sequence | None:
        """The youngest of the tenant that holds most, if `head` is of one that holds less by two at least, whatever
        their priorities. Else, if its call has none: of its tenant's calls that are not more urgent."""
        tenant, call = head.request.tenant, head.request.call
        if not call:
            return None
        most = max(self._by_tenant.values(), default=0)
        if self._by_tenant[tenant] + 1 < most:
            largest = {name for name, number in self._by_tenant.items() if number == most}
            found = (other for other in youngest_first if other.request.call and other.request.tenant in largest)
        elif (own := self._by_call.get(tenant)) is not None and not own[call]:
            most = max(own.values())
            largest = {name for name, number in own.items() if number == most}
            found = (
                other
                for other in youngest_first
                if (other.request.tenant == tenant and other.request.call in largest)
                and other.request.priority >= head.request.priority
            )
        else:
            return None
        return next(filter(_may_give_way, found), None) if most > 1 else None

    def num_giving_way(self, head: Sequence, number: int) -> int:
        """Where somebody gives way for `head`: how many do for `number` of it and its siblings, one after another."""
        tenant = head.request.tenant
        own = self._by_tenant[tenant]
        others = [held for name, held in self._by_tenant.items() if name != tenant]
        given = 0
        while others and given < number and own + given + 1 < (most := max(others)):
            others[others.index(most)] -= 1
            given += 1
        return given or 1  # a call of its tenant gives one to a call that has none


def _take_one(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if not counts[name]:
        del counts[name]


def _may_give_way(sequence: Sequence) -> bool:
    return not sequence.timing.preemptions or sequence.next_position - sequence.high_water >= AGAIN_AFTER_TOKENS
