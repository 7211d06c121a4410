"""Steps that are decided beforehand: while everyone who runs decodes, or will when the step in flight is over, nobody
can join and blocks suffice, the next step is the last one with every position one further on, less those whose answers
are full. A simulation takes so many at once; what is left then is what as many calls of `schedule` and `apply` would
have left, block for block."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Series
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from twostroke.core.sequence import Sequence
from twostroke.core.step import DecodeSlot, Step
from twostroke.kv.ledger import Holding, KVLedger
from twostroke.scheduling.admission import Admission
from twostroke.scheduling.waits import Wait

RESERVE, ADVANCE, ADVANCE_CHUNK = 0, 1, 2
"""In this order within a turn."""
NEVER = 1 << 62


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
        self,
        admission: Admission,
        ledger: KVLedger,
        streams: list[Sequence],
        ends: list[int],
        num_turns: int,
        in_flight: Step | None,
    ) -> None:
        """`ends`: of each stream the turn that brings its last token."""
        self.num_turns = num_turns
        self._admission = admission
        self._ledger = ledger
        self._streams = streams
        self._ends = ends
        self._num_in_flight = 0 if in_flight is None else 1
        self._chunks = {} if in_flight is None else {chunk.seq_id: at for at, chunk in enumerate(in_flight.prefills)}
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
            self._next_end = min((end for end in self._ends if end >= turn + self._num_in_flight), default=NEVER)
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
            if sequence.seq_id in self._chunks:  # the first turn took in the last of its prompt
                timing.decode_compute_s -= turns[0].compute_s
                timing.prefill_compute_s += turns[0].compute_s
        self._play(turns, finish)
        in_flight, ended, last = [], [], set()
        for sequence, end, first in zip(self._streams, self._ends, self._firsts, strict=True):
            if end >= num_turns:
                sequence.num_computed = first - self._num_in_flight + num_turns
                sequence.num_in_flight = self._num_in_flight
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

    def _play(self, turns: Series[Turn], finish: Callable[[Sequence, float], object]) -> None:
        """Whatever would have changed the ledger, in the order in which it would have."""
        events: list[tuple[int, int, int, int]] = []  # turn, what, in which order, whose
        num_turns, firsts, ends, chunks = len(turns), self._firsts, self._ends, self._chunks
        for place, sequence in enumerate(self._streams):
            holding, first = self._holding(sequence), firsts[place]
            if self._grows_in(place, holding) < num_turns:
                events.append((holding.end - first, RESERVE, place, place))
            if (turn := self._advances_in(place, holding)) < num_turns:
                if turn == 0 and sequence.seq_id in chunks:
                    events.append((turn, ADVANCE_CHUNK, chunks[sequence.seq_id], place))
                else:
                    events.append((turn, ADVANCE, place, place))
        heapify(events)
        while events:
            turn, what, _, place = heappop(events)
            sequence = self._streams[place]
            holding = self._holding(sequence)
            if what == RESERVE:
                granted = self._ledger.reserve(sequence, firsts[place] + turn + 1)
                assert granted is not None  # so many turns were found to have their blocks
                follows = self._grows_in(place, holding)
            else:
                sequence.num_computed = firsts[place] - self._num_in_flight + turn + 1
                self._ledger.commit(sequence)
                if turn == ends[place]:
                    finish(sequence, turns[turn].ended_s)
                    continue
                what, follows = ADVANCE, self._advances_in(place, holding)
            if follows < num_turns:
                heappush(events, (follows, what, place, place))

    def _grows_in(self, place: int, holding: Holding) -> int:
        """The turn in which a stream next needs a block."""
        turn = holding.end - self._firsts[place]
        return turn if turn + self._num_in_flight <= self._ends[place] else NEVER

    def _advances_in(self, place: int, holding: Holding) -> int:
        """The turn in which it next has something to commit, or ends."""
        due = holding.commits_at - self._firsts[place] + self._num_in_flight - 1
        return min(self._ends[place], max(0, due))

    def _holding(self, sequence: Sequence) -> Holding:
        holding = self._ledger.holding(sequence)
        assert holding is not None
        return holding


def find_run(admission: Admission, ledger: KVLedger, in_flight: Step | None, token_id: int) -> SteadyRun | None:
    """The turns to come that are decided if every stream is given `token_id` and nothing else happens; None: the next
    one is not. There is always a stream to launch."""
    streams = list(admission.running)
    someone_waits = len(admission.waiting) > 0
    if not streams or (someone_waits and (not admission.is_taken or admission.who_gives_way() is not None)):
        return None
    launched: dict[int, int] = {}
    if in_flight is not None:
        if len(in_flight.decodes) + len(in_flight.prefills) != len(streams):
            return None
        launched = {chunk.seq_id: len(chunk.token_ids) for chunk in in_flight.prefills}
    num_in_flight = 0 if in_flight is None else 1
    ends = []
    for sequence in streams:
        if sequence.num_in_flight != launched.get(sequence.seq_id, num_in_flight) or token_id in sequence.stop_ids:
            return None
        if sequence.num_computed + sequence.num_in_flight < sequence.prefill_len:
            return None  # it has more to read
        ends.append(sequence.max_total_tokens - 1 - len(sequence.tokens))
    num_turns = max(ends) + 1 - num_in_flight
    if someone_waits:
        num_turns = min(num_turns, min(ends) + 1)  # who ends makes room for who waits
    num_turns = _with_blocks(ledger, streams, num_turns)
    return SteadyRun(admission, ledger, streams, ends, num_turns, in_flight) if num_turns > 0 else None


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
