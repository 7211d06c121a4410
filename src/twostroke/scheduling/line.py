"""Those who wait, and whose turn it is. Tenants take turns, whatever the priorities of their requests; within a tenant
its calls take turns, a call's turn being as old as its last admission; who has nothing running comes before who has.
Within a call, and for requests without one, the order is arrival shifted by priority. Knows nothing of KV."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from twostroke.core.sequence import Sequence
from twostroke.scheduling.queue import Rank, RankedQueue, rank_of
from twostroke.scheduling.shares import Shares


class _Call:
    """What waits of one API call, or of all requests of a tenant that belong to none."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.since_s = -math.inf
        """When its last turn was."""
        self.waiting = RankedQueue[Sequence]()


class _Tenant:
    def __init__(self, name: str, priority_aging_s: float, shares: Shares) -> None:
        self._name = name
        self._aging_s = priority_aging_s
        self._shares = shares
        self._by_name: dict[str, _Call] = {}
        self._calls = RankedQueue[_Call]()
        self.preempted = RankedQueue[Sequence]()
        """Those that ran and lost their KV: they have had their turn, and keep their rank."""
        self.number = 0
        """Of all that wait here."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.preempted
        for call in self._calls:
            yield from call.waiting

    def add(self, sequence: Sequence, since_s: float | None = None) -> int:
        """`since_s`: its call's turn begins anew then. Returns how many of this tenant go before it."""
        name = sequence.request.call
        call = self._by_name.get(name)
        if call is None:
            call = self._by_name[name] = _Call(name)
        place = call.waiting.add(sequence, rank_of(sequence, self._aging_s))
        if since_s is not None:
            call.since_s = since_s
        self._place(call)
        self.number += 1
        if len(self._by_name) == 1:
            return place + len(self.preempted)
        others = sum(min(len(other.waiting), place + 1) for other in self._by_name.values() if other is not call)
        return place + others + len(self.preempted)

    def resume(self, sequence: Sequence, rank: Rank) -> None:
        self.preempted.add(sequence, rank)
        self.number += 1

    def remove(self, sequence: Sequence, since_s: float | None) -> None:
        self.number -= 1
        if sequence in self.preempted:
            self.preempted.remove(sequence)
            return
        call = self._by_name[sequence.request.call]
        call.waiting.remove(sequence)
        if since_s is not None and call.name:
            call.since_s = since_s
        self._place(call)

    def rank(self, sequence: Sequence) -> Rank:
        if sequence in self.preempted:
            return self.preempted.rank(sequence)
        return rank_of(sequence, self._aging_s, self._by_name[sequence.request.call].since_s)

    def first(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        newcomer, resuming = self._first_newcomer(fits), self.preempted.first(fits)
        if newcomer is None or resuming is None:
            return newcomer or resuming
        return min(newcomer, resuming, key=self.rank)

    def _first_newcomer(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """The first by rank, unless its call has something running: then the first one that is as urgent and whose
        call has not."""
        found: Sequence | None = None
        for call in self._calls:
            sequence = call.waiting.first(fits)
            if sequence is None:
                continue
            has_slot = self._shares.has_slot(self._name, call.name)
            if found is None:
                found = sequence
            elif not has_slot and sequence.request.priority <= found.request.priority:
                return sequence
            if not has_slot and found is sequence:
                break
        return found

    def _place(self, call: _Call) -> None:
        """Where its first one belongs, among the others' first ones."""
        if call in self._calls:
            self._calls.remove(call)
        head = call.waiting.first()
        if head is None:
            del self._by_name[call.name]
        else:
            self._calls.add(call, rank_of(head, self._aging_s, call.since_s))


class Line:
    def __init__(self, priority_aging_s: float, shares: Shares) -> None:
        self._aging_s = priority_aging_s
        self._shares = shares
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """The one whose turn it is first; only those that wait."""
        self._number = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in tuple(self._tenants.values()):
            yield from tenant

    def add(self, sequence: Sequence) -> int:
        """A newcomer. Returns about how many go before it, as far as they are known."""
        tenant = self._enter(sequence)
        place = tenant.add(sequence)
        if len(self._tenants) == 1:
            return place
        return place + sum(min(other.number, place + 1) for other in self._tenants.values() if other is not tenant)

    def resume(self, sequence: Sequence, rank: Rank) -> None:
        """One that ran lost its KV: its tenant is next, so that nobody else moves into the blocks that it left."""
        self._enter(sequence).resume(sequence, rank)
        self._tenants.move_to_end(sequence.request.tenant, last=False)

    def give_way(self, sequence: Sequence, now_s: float) -> None:
        """One that ran gave its slot to another: its call's next turn comes after the others'."""
        self._enter(sequence).add(sequence, now_s)

    def first(self, fits: Callable[[Sequence], bool]) -> Sequence | None:
        """Whoever is to go next, of those that may."""
        for holds in (False, True):
            for name, tenant in self._tenants.items():
                if self._shares.has_slot(name) is holds and (found := tenant.first(fits)) is not None:
                    return found
        return None

    def take(self, sequence: Sequence, now_s: float) -> Rank:
        """It is let in: the next turns are those of other calls and tenants. Returns the rank that it runs with."""
        name = sequence.request.tenant
        tenant = self._tenants[name]
        rank, is_resuming = tenant.rank(sequence), sequence in tenant.preempted
        self._leave(sequence, now_s)
        if tenant.number and not (is_resuming and len(tenant.preempted)):
            self._tenants.move_to_end(name)
        return rank

    def drop(self, sequence: Sequence) -> None:
        """It does not wait any more, and was not let in."""
        self._leave(sequence, None)

    def _enter(self, sequence: Sequence) -> _Tenant:
        name = sequence.request.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._aging_s, self._shares)
        self._number += 1
        self.num_prompt_tokens += sequence.prompt_len
        return tenant

    def _leave(self, sequence: Sequence, since_s: float | None) -> None:
        tenant = self._tenants[sequence.request.tenant]
        tenant.remove(sequence, since_s)
        self._number -= 1
        self.num_prompt_tokens -= sequence.prompt_len
        if not tenant.number:
            del self._tenants[sequence.request.tenant]
