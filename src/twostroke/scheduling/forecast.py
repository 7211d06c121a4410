"""Predicts seconds: of prompts still to be read, until a newcomer's first token, until KV is full. Learns from the cost
model, and from what the last steps took. Knows sequences and steps; decides nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from twostroke.core.sequence import Sequence
from twostroke.cost.floor import StepWork
from twostroke.cost.trust import at_least_s
from twostroke.kv.block_pool import BlockPool

NOMINAL_TOKEN_S = 1e-3
"""Seconds that a token counts for if nobody knows what a step costs. Orders and shares then follow the number of
tokens."""
RECENT = 32
"""A mean is over about this many of the latest steps or ends."""
GROWTH_SAMPLE_S, GROWTH_SAMPLES = 0.25, 40
"""KV use is noted at these intervals in seconds, and this many notes are kept: ten seconds of them."""
GROWTH_LEAST_S = 1.0
"""Notes over fewer seconds than this do not show whether KV use grows."""

LEAST_READ_TOKENS = 16
"""How many tokens of a prompt a step reads at least, however long its streams take."""
MOST_STRETCH = 100.0

StepSeconds = Callable[[StepWork], float]
StepError = Callable[[], float | None]


def nominal_seconds(work: StepWork) -> float:
    return work.num_tokens * NOMINAL_TOKEN_S


def exactly() -> float:
    """Returns the error of predictions that are exact."""
    return 0.0


class RecentMean:
    """The mean of about the last RECENT values."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._number = 0

    def take(self, value: float) -> None:
        self._number = min(self._number + 1, RECENT)
        self.value += (value - self.value) / self._number


class Forecast:
    def __init__(self, step_seconds: StepSeconds | None = None, step_error: StepError = exactly) -> None:
        """`step_seconds` predicts a step's seconds, as `StepCost.seconds` does, and may learn meanwhile. `step_error`
        says how far off that was on average, as `cost.trust.error_of` does."""
        self.step_seconds = step_seconds or nominal_seconds
        self._step_error = step_error
        self.stretch = 1.0
        """Seconds of a step that reads beside the present streams, for each second that reading alone would take. It is
        1 if nobody writes."""
        self.step_s = RecentMean(0.0)
        """Seconds of a step in which streams write."""
        self.reading_step_s = RecentMean(0.0)
        """Seconds of a step in which something is read."""
        self.between_ends_s = RecentMean(0.0)
        """Seconds from one running sequence's end to the next one's."""
        self._last_end_s: float | None = None
        self._reading_s: dict[int, tuple[int, int, float]] = {}  # by sequence id: the first token, the end, the seconds
        self._num_cached: dict[int, int] = {}  # by sequence id: tokens that will not have to be read
        self._growth: deque[tuple[float, tuple[int, ...]]] = deque(maxlen=GROWTH_SAMPLES)

    def at_least_s(self, predicted_s: float) -> float:
        """Returns the least seconds that this will take, allowing for the known error of predictions. A request is
        refused only because of these. 0 means that nothing is known: then everybody is let in, for the engine learns
        only from what runs."""
        return at_least_s(predicted_s, None if self.step_seconds is nominal_seconds else self._step_error())

    # Reading

    def prefill_s(self, start: int, end: int) -> float:
        """Returns the seconds to read a prompt's tokens from `start` to `end`, in one step that holds nothing else."""
        return self.step_seconds(StepWork(((start, end - start),), 1)) if end > start else 0.0

    def expect(self, sequence: Sequence, num_cached: int) -> None:
        """Notes that a sequence waits, and how many of its tokens the prefix cache has."""
        self._num_cached[sequence.seq_id] = num_cached

    def reading_s(self, sequence: Sequence) -> float:
        """Returns the seconds to read what is left of a sequence. The result is kept until the sequence has moved
        on."""
        start, end = max(sequence.next_position, self._num_cached.get(sequence.seq_id, 0)), len(sequence.tokens)
        known = self._reading_s.get(sequence.seq_id)
        if known is None or known[:2] != (start, end):
            known = self._reading_s[sequence.seq_id] = (start, end, self.prefill_s(start, end))
        return known[2]

    def forget(self, sequence: Sequence) -> None:
        self._reading_s.pop(sequence.seq_id, None)
        self._num_cached.pop(sequence.seq_id, None)

    def first_token_s(self, ahead_s: float, own_s: float, num_slots_short: int = 0) -> float:
        """Returns the seconds from now to a prompt's first token. What goes before it, and the prompt itself, are read
        beside the present streams. If slots are short, that many running sequences have to end, too."""
        return self.stretch * (ahead_s + own_s) + num_slots_short * self.between_ends_s.value

    def last_start_s(self, sequence: Sequence, due_s: float) -> float:
        """Returns the latest moment at which a prompt can be begun to be read by `due_s`. It waits for a step in
        flight, and is then read beside the present streams."""
        return due_s - self.reading_step_s.value - self.stretch * self.reading_s(sequence)

    # Learning

    def note_streams(self, contexts: list[int], max_tokens: int, limit_s: float) -> None:
        """Notes which streams write. Beside them a step has room for `max_tokens` of a prompt, and may take
        `limit_s`."""
        self.stretch = 1.0
        if not contexts:
            return
        num_tokens = max(LEAST_READ_TOKENS, max_tokens)
        beside_s = self._beside_s(contexts, num_tokens)
        if limit_s < inf:
            streams_s = self.step_seconds(StepWork(contexts=contexts))
            added_s, left_s = beside_s - streams_s, max(0.0, limit_s - streams_s)
            if added_s > left_s:
                num_tokens = max(LEAST_READ_TOKENS, int(num_tokens * left_s / added_s))
                beside_s = self._beside_s(contexts, num_tokens)
        alone_s = self.prefill_s(0, num_tokens)
        if alone_s > 0.0:
            self.stretch = min(max(1.0, beside_s / alone_s), MOST_STRETCH)

    def _beside_s(self, contexts: list[int], num_tokens: int) -> float:
        return self.step_seconds(StepWork(((0, num_tokens),), 1, contexts=contexts))

    def note_step(self, compute_s: float, reading_s: float, num_streams: int) -> None:
        """Notes that a step came back. `reading_s` was predicted for the prompts in it."""
        if reading_s > 0.0:
            self.reading_step_s.take(compute_s)
        if num_streams:
            self.step_s.take(compute_s)

    def note_end(self, now_s: float) -> None:
        """Notes that a running sequence has ended."""
        if self._last_end_s is not None:
            self.between_ends_s.take(max(0.0, now_s - self._last_end_s))
        self._last_end_s = now_s

    def note_idle(self) -> None:
        """Notes that nothing runs, so that the time to the next end is not counted."""
        self._last_end_s = None
        self.stretch = 1.0
        self._growth.clear()

    # KV space

    def note_kv(self, now_s: float, pools: Iterable[BlockPool]) -> None:
        if self._growth and now_s < self._growth[-1][0]:
            self._growth.clear()  # the clock went back
        if not self._growth or now_s >= self._growth[-1][0] + GROWTH_SAMPLE_S:
            self._growth.append((now_s, tuple(pool.num_referenced for pool in pools)))

    def kv_full_s(self, now_s: float, pools: Iterable[BlockPool]) -> float | None:
        """Returns the seconds until a pool is full, if it grows as it did of late. None means that none is filling, or
        that it is not known yet."""
        if not self._growth or now_s - self._growth[0][0] < GROWTH_LEAST_S:
            return None
        began_s, used_then = self._growth[0]
        least_s = inf
        for pool, before in zip(pools, used_then, strict=True):
            grown = pool.num_referenced - before
            if grown > 0:
                least_s = min(least_s, pool.num_available * (now_s - began_s) / grown)
        return None if least_s == inf else least_s
