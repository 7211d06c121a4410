"""What the line waits for, as a clock for each reason: a sample notes them when it arrives and when it is admitted, and
the difference is what it waited for. A few additions a step, however long the line."""

from __future__ import annotations

from enum import IntEnum

from twostroke.core.sequence import Sequence


class Wait(IntEnum):
    STEP = 0
    """Nothing but the step that is running."""
    SLOTS = 1
    BLOCKS = 2
    PROMPTS = 3
    SIBLING = 4
    TIERS = 5
    GAPS = 6
    """One more stream would make steps longer than was promised."""


class WaitClock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.reason = Wait.STEP
        """Since `now_s`."""
        self.last_reason = Wait.STEP
        """Until then."""
        self._seconds = [0.0] * len(Wait)
        self._marks: dict[int, list[float]] = {}  # by sequence id, of those that wait for the first time

    def tick(self, now_s: float) -> None:
        """A step is being chosen: until now it was the last one's reason; the planners will set the next."""
        self._seconds[self.reason] += now_s - self.now_s
        self.now_s = now_s
        self.last_reason, self.reason = self.reason, Wait.STEP

    def begin(self, sequence: Sequence) -> None:
        mark = list(self._seconds)
        mark[self.reason] += max(0.0, sequence.request.arrival_s - self.now_s)
        self._marks[sequence.seq_id] = mark

    def refuse(self, head: Sequence, short_blocks: tuple[int, ...]) -> None:
        """The first in line does not fit in KV."""
        self.reason = Wait.BLOCKS
        record = head.timing.queue
        if record.refused_s is None:
            record.refused_s, record.short_blocks = self.now_s, short_blocks

    def end(self, sequence: Sequence) -> None:
        """It is admitted, or gone; later waits, after preemption, are not the queue's."""
        mark = self._marks.pop(sequence.seq_id, None)
        if mark is None:
            return
        waited = [max(0.0, now - then) for now, then in zip(self._seconds, mark, strict=True)]
        record = sequence.timing.queue
        record.slots_s, record.blocks_s = waited[Wait.SLOTS], waited[Wait.BLOCKS]
        record.prompts_s, record.sibling_s = waited[Wait.PROMPTS], waited[Wait.SIBLING]
        record.tiers_s, record.gaps_s = waited[Wait.TIERS], waited[Wait.GAPS]
