"""Those who wait, and whose turn it is. The policy says which flows there are (its tenants, or one for all), which of
them is next, and the order within. Calls of a flow take turns: a call's turn is as old as its last admission, and who
has nothing running comes before who has. Those whose promise is lost are kept apart. Knows nothing of KV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from twostroke.core.sequence import Sequence
from twostroke.scheduling.policies.policy import Policy
from twostroke.scheduling.queue import Rank, RankedQueue
from twostroke.scheduling.shares import Shares

Fits = Callable[[Sequence], bool]


class _Call:
    """What waits of one API call. A request that belongs to none is one by itself."""

    def __init__(self, key: str | int) -> None:
        self.key = key
        self.since_s = -math.inf
        """When its last turn was."""
        self.waiting = RankedQueue[Sequence]()

    @property
    def is_named(self) -> bool:
        return isinstance(self.key, str)


class _Flow:
    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy = policy
        self._shares = shares
        self._calls: dict[str | int, _Call] = {}  # by name, or by the id of a sequence that belongs to none
        self._num_named = 0
        self._on_time = RankedQueue[_Call]()
        """By the ranks of their first ones."""
        self._lost = RankedQueue[_Call]()
        self._losing: list[tuple[float, int, Sequence]] = []
        """A heap of when the first one of a call will be lost; some entries are of the past."""
        self.preempted = RankedQueue[Sequence]()
        """Those that ran and lost their KV: they have had their turn, and keep their rank."""
        self.number = 0
        """Of all that wait here."""

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.preempted
        for calls in (self._on_time, self._lost):
            for call in calls:
                yield from call.waiting

    def add(self, sequence: Sequence, since_s: float | None = None) -> int:
        """`since_s`: its call's turn begins anew then. Returns about how many of this flow go before it."""
        key = self._key(sequence)
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = _Call(key)
            self._num_named += call.is_named
        place = call.waiting.add(sequence, self._policy.rank(sequence))
        if since_s is not None:
            call.since_s = since_s
        before = self._place(call)
        self.number += 1
        if self._num_named:  # calls take turns
            others = (other for other in self._calls.values() if other is not call)
            before = place + sum(min(len(other.waiting), place + 1) for other in others)
        return before + len(self.preempted)

    def resume(self, sequence: Sequence, rank: Rank) -> None:
        self.preempted.add(sequence, rank)
        self.number += 1

    def remove(self, sequence: Sequence, since_s: float | None) -> None:
        self.number -= 1
        if sequence in self.preempted:
            self.preempted.remove(sequence)
            return
        call = self._calls[self._key(sequence)]
        call.waiting.remove(sequence)
        if since_s is not None:
            call.since_s = since_s
        self._place(call)

    def rank(self, sequence: Sequence) -> Rank:
        if sequence in self.preempted:
            return self.preempted.rank(sequence)
        return self._policy.rank(sequence, self._calls[self._key(sequence)].since_s)

    def first(self, name: str, fits: Fits, now_s: float) -> Sequence | None:
        newcomer, resuming = self._first_newcomer(name, fits, now_s), self.preempted.first(fits)
        if newcomer is None or resuming is None:
            return newcomer or resuming
        return min(newcomer, resuming, key=self.rank)

    def _first_newcomer(self, name: str, fits: Fits, now_s: float) -> Sequence | None:
        """Of those that can still be met, unless it is the turn of the others, or there are none."""
        self._part_lost(now_s)
        bands = (self._on_time, self._lost)
        if len(self._lost) and self._policy.reads_lost(name):
            bands = (self._lost, self._on_time)
        for calls in bands:
            if (found := self._first_of(calls, fits)) is not None:
                if calls is self._on_time and len(self._lost):
                    self._policy.note_passed(name)
                return found
        return None

    def _first_of(self, calls: RankedQueue[_Call], fits: Fits) -> Sequence | None:
        """The first by rank, unless its call has something running: then the first one that is as urgent and whose
        call has not."""
        found: Sequence | None = None
        for call in calls.walk():
            sequence = call.waiting.first(fits)
            if sequence is None:
                continue
            has_slot = call.is_named and self._shares.has_slot(sequence.request.tenant, sequence.request.call)
            if found is None:
                found = sequence
            elif not has_slot and sequence.request.priority <= found.request.priority:
                return sequence
            if not has_slot and found is sequence:
                break
        return found

    def _key(self, sequence: Sequence) -> str | int:
        return (self._policy.calls_take_turns and sequence.request.call) or sequence.seq_id

    def _place(self, call: _Call) -> int:
        """Where its first one belongs, among the others' first ones. Returns how many of those go before it."""
        for calls in (self._on_time, self._lost):
            if call in calls:
                calls.remove(call)
        head = call.waiting.first()
        if head is None:
            self._num_named -= call.is_named
            del self._calls[call.key]
            return 0
        lost_s = self._policy.lost_s(head)
        if lost_s < math.inf:
            heappush(self._losing, (lost_s, head.seq_id, head))
        return self._on_time.add(call, self._policy.rank(head, call.since_s)) + len(self._lost)

    def _part_lost(self, now_s: float) -> None:
        """Each that is lost by now goes to the others that are."""
        while self._losing and self._losing[0][0] < now_s:
            _, _, head = heappop(self._losing)
            call = self._calls.get(self._key(head))
            if call is not None and call in self._on_time and call.waiting.first() is head:
                rank = self._on_time.rank(call)
                self._on_time.remove(call)
                self._lost.add(call, rank)


class Line:
    def __init__(self, policy: Policy, shares: Shares) -> None:
        self._policy = policy
        self._shares = shares
        self._flows: dict[str, _Flow] = {}
        """Only those that wait."""
        self._number = 0
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Sequence]:
        for flow in tuple(self._flows.values()):
            yield from flow

    def add(self, sequence: Sequence) -> int:
        """A newcomer. Returns about how many go before it, as far as they are known."""
        flow = self._enter(sequence)
        place = flow.add(sequence)
        if len(self._flows) == 1:
            return place
        return place + sum(min(other.number, place + 1) for other in self._flows.values() if other is not flow)

    def resume(self, sequence: Sequence, rank: Rank) -> None:
        """One that ran lost its KV: it keeps its rank, so that nobody behind it moves into the blocks that it left."""
        self._enter(sequence).resume(sequence, rank)

    def give_way(self, sequence: Sequence, now_s: float) -> None:
        """One that ran gave its slot to another: its call's next turn comes after the others'."""
        self._enter(sequence).add(sequence, now_s)

    def first(self, fits: Fits, now_s: float, may_begin: Callable[[str], bool] = lambda flow: True) -> Sequence | None:
        """Whoever is to go next, of those that may, and of the flows that may."""
        for name in self._policy.in_turn(self._flows):
            if may_begin(name) and (found := self._flows[name].first(name, fits, now_s)) is not None:
                return found
        return None

    def take(self, sequence: Sequence, now_s: float) -> Rank:
        """It is let in: the next turns are those of other calls. Returns the rank that it runs with."""
        rank = self._flows[self._policy.flow(sequence)].rank(sequence)
        self._leave(sequence, now_s)
        return rank

    def drop(self, sequence: Sequence) -> None:
        """It does not wait any more, and was not let in."""
        self._leave(sequence, None)

    def _enter(self, sequence: Sequence) -> _Flow:
        name = self._policy.flow(sequence)
        flow = self._flows.get(name)
        if flow is None:
            flow = self._flows[name] = _Flow(self._policy, self._shares)
        self._number += 1
        self.num_prompt_tokens += sequence.prompt_len
        return flow

    def _leave(self, sequence: Sequence, since_s: float | None) -> None:
        name = self._policy.flow(sequence)
        flow = self._flows[name]
        flow.remove(sequence, since_s)
        self._number -= 1
        self.num_prompt_tokens -= sequence.prompt_len
        if not flow.number:
            del self._flows[name]
