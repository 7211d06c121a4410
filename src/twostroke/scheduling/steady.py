"""Steps that are decided beforehand: while everyone who runs decodes, nobody can join and blocks suffice, the next step
is the last one with every position one further on, less those whose answers are full. A simulation takes so many at
once; what is left then is what as many calls of `schedule` and `apply` would have left, block for block."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Series
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from twostroke.core.sequence import Sequence
from twostroke.core.step import DecodeSlot
from twostroke.kv.ledger import Holding, KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.waits import Wait

RESERVE, ADVANCE = 0, 1
"""In this order within a turn."""


class Turn(NamedTuple):
    """One step launched, and the oldest one taken in."""

    launched_s: float
    ended_s: float
    compute_s: float
    """Of the one taken in."""


class SteadyRun:
    """Turns to come, good until the scheduler is asked for anything else. In every one of them each stream is given
    one token; a stream whose answer is full then ends."""

    def __init__(
        self, admission: Admission, ledger: KVLedger, streams: list[Sequence], ends: list[int], num_turns: int
    ) -> None:
        """`ends`: of each stream the turn that brings its last token."""
        self.num_turns = num_turns
        self._admission = admission
        self._ledger = ledger
        self._streams = streams
        self._ends = ends
        self._num_in_flight = streams[0].num_in_flight
        self._firsts = [sequence.next_position for sequence in streams]  # what the first turn launches
        self._next_end = min(ends)
        self._launching = self._launched_after(-1)

    def _launched_after(self, turn: int) -> list[int]:
        """The positions of the first turn, of those who have a slot in the turn after this one. What is in flight
        brings a stream's last token, so that its last slot is launched as much earlier."""
        last = turn + self._num_in_flight
        return [first for first, end in zip(self._firsts, self._ends, strict=True) if end > last]

    def contexts(self, turn: int) -> list[int]:
        """Of the decode slots that a turn launches. Turns are asked for in order."""
        if turn + self._num_in_flight > self._next_end:
            self._launching = self._launched_after(turn - 1)
            self._next_end = min((end for end in self._ends if end >= turn + self._num_in_flight), default=1 << 62)
        return [first + turn + 1 for first in self._launching]

    def num_ending(self, turn: int) -> int:
        """Streams that end in it."""
        return self._ends.count(turn)

    def take(
        self, turns: Series[Turn], token_id: int, finish: Callable[[Sequence, float], object]
    ) -> tuple[list[DecodeSlot], list[Sequence]]:
        """The first of these turns happened, and gave every stream this token each time. `finish` ends one, at a time.
        Returns the slots of the step then in flight, if one is, and who ended."""
        num_turns = len(turns)
        if not 0 < num_turns <= self.num_turns:
            raise ValueError(f"{num_turns} turns were taken, and {self.num_turns} are decided")
        self._tick(turns)
        self._admission.rows_to_close.clear()
        tokens, ended_s = [token_id] * num_turns, [turn.ended_s for turn in turns]
        compute_s = sum(turn.compute_s for turn in turns)
        computed = [sequence.num_computed for sequence in self._streams]
        for sequence, end in zip(self._streams, self._ends, strict=True):
            timing = sequence.timing
            if end >= num_turns:
                sequence.tokens += tokens
                timing.token_times_s += ended_s
                timing.decode_compute_s += compute_s
            else:
                sequence.tokens += tokens[: end + 1]
                timing.token_times_s += ended_s[: end + 1]
                timing.decode_compute_s += sum(turn.compute_s for turn in turns[: end + 1])
        self._play(turns, computed, finish)
        in_flight, ended, last = [], [], set()
        for sequence, end, before in zip(self._streams, self._ends, computed, strict=True):
            if end >= num_turns:
                sequence.num_computed = before + num_turns
                if self._num_in_flight:
                    in_flight.append(DecodeSlot(sequence.seq_id, sequence.num_computed))
                continue
            sequence.num_in_flight = 0
            ended.append(sequence)
            if end == num_turns - 1:
                last.add(sequence.seq_id)
        self._admission.rows_to_close[:] = [name for name in self._admission.rows_to_close if name in last]
        return in_flight, ended

    def _tick(self, turns: Series[Turn]) -> None:
        waits, full_until = self._admission.waits, min(self._ends) if self._admission.is_taken else -1
        for number, turn in enumerate(turns):
            waits.tick(turn.launched_s)
            waits.reason = Wait.SLOTS if number <= full_until else Wait.STEP

    def _play(self, turns: Series[Turn], computed: list[int], finish: Callable[[Sequence, float], object]) -> None:
        """Whatever would have changed the ledger, in the order in which it would have."""
        events: list[tuple[int, int, int]] = []  # turn, what, whose
        num_turns, firsts, ends = len(turns), self._firsts, self._ends
        for place, sequence in enumerate(self._streams):
            holding = self._holding(sequence)
            if holding.end - firsts[place] < num_turns and self._due(RESERVE, place, holding, 0) < num_turns:
                events.append((holding.end - firsts[place], RESERVE, place))
            if holding.commits_at - computed[place] <= num_turns or ends[place] < num_turns:
                events.append((self._due(ADVANCE, place, holding, computed[place]), ADVANCE, place))
        heapify(events)
        while events:
            turn, what, place = heappop(events)
            sequence = self._streams[place]
            holding = self._holding(sequence)
            if what == RESERVE:
                granted = self._ledger.reserve(sequence, self._firsts[place] + turn + 1)
                assert granted is not None  # so many turns were found to have their blocks
            else:
                sequence.num_computed = computed[place] + turn + 1
                self._ledger.commit(sequence)
                if turn == self._ends[place]:
                    finish(sequence, turns[turn].ended_s)
                    continue
            if (follows := self._due(what, place, holding, computed[place])) < len(turns):
                heappush(events, (follows, what, place))

    def _due(self, what: int, place: int, holding: Holding, computed: int) -> int:
        """The turn in which a stream next needs a block, or next has something to commit or ends."""
        end = self._ends[place]
        if what == ADVANCE:
            return min(end, holding.commits_at - computed - 1)
        turn = holding.end - self._firsts[place]
        return turn if turn + self._num_in_flight <= end else 1 << 62

    def _holding(self, sequence: Sequence) -> Holding:
        holding = self._ledger.holding(sequence)
        assert holding is not None
        return holding


def find_run(admission: Admission, ledger: KVLedger, num_launched: int, token_id: int) -> SteadyRun | None:
    """The turns to come that are decided if every stream is given `token_id` and nothing else happens; None: the next
    one is not. There is always a stream to launch. `num_launched`: slots of the step that is in flight, if one is."""
    streams = list(admission.running)
    someone_waits = len(admission.waiting) > 0
    if not streams or (someone_waits and not admission.is_taken):
        return None
    num_in_flight = streams[0].num_in_flight
    if num_in_flight > 1 or num_launched != num_in_flight * len(streams):
        return None
    ends = []
    for sequence in streams:
        if sequence.num_in_flight != num_in_flight or token_id in sequence.stop_ids:
            return None
        if sequence.num_computed + num_in_flight < sequence.prefill_len:
            return None  # it still reads
        ends.append(sequence.max_total_tokens - 1 - len(sequence.tokens))
    num_turns = max(ends) + 1 - num_in_flight
    if someone_waits:
        num_turns = min(num_turns, min(ends) + 1)  # who ends makes room for who waits
    num_turns = _with_blocks(ledger, streams, num_turns)
    return SteadyRun(admission, ledger, streams, ends, num_turns) if num_turns > 0 else None


def _with_blocks(ledger: KVLedger, streams: list[Sequence], num_turns: int) -> int:
    """The most turns, up to these, whose blocks are there even if nobody gave any back."""
    available = min(pool.num_available for pool in ledger.pools)
    block_size = ledger.layout.block_size
    rooms, most = [], []
    for sequence in streams:
        holding = ledger.holding(sequence)
        assert holding is not None
        rooms.append(holding.end - sequence.next_position)
        most.append(sequence.max_total_tokens - 1 - sequence.next_position)

    def suffices(turns: int) -> bool:
        needed = 0
        for room, slots in zip(rooms, most, strict=True):
            beyond = min(turns, slots) - room
            if beyond > 0:
                needed += -(-beyond // block_size)
        return needed <= available

    if num_turns <= 0 or suffices(num_turns):
        return num_turns
    low, high = 0, num_turns
    while low < high:
        middle = (low + high + 1) // 2
        if suffices(middle):
            low = middle
        else:
            high = middle - 1
    return low
