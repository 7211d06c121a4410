"""Decides how many drafts a step has room for, before anybody has made one: as many as would pay if all of them held.
Asks the cost model that everything else is scheduled by. The choice among real drafts is made where they are known."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Series

from twostroke.core.sequence import Sequence
from twostroke.core.step import NO_COSTS, DraftCosts, Drafts
from twostroke.cost.floor import StepWork

REPEATS = 32
"""How many steps use one curve of costs, unless the number of streams changes: contexts hardly grow meanwhile."""
LEAST_PROMISE = 1.1
"""Drafts that all hold must bring this many times the tokens a second, or no drafter is asked. In fact not all hold,
and asking costs something."""
EACH_UP_TO, IN_FOURS_UP_TO = 16, 64
"""The cost of drafts is asked for each number of them up to the first limit, then for every fourth, then for each power
of two. Matrix products come in tiles, so a few drafts more may cost less than a few."""


class DraftBudget:
    def __init__(self, step_seconds: Callable[[StepWork], float], max_drafts: int, methods: Series[str]) -> None:
        """`methods` are the names that a request can ask for."""
        self._step_seconds = step_seconds
        self._max_drafts = max_drafts
        self.methods = tuple(methods)
        self._costs = NO_COSTS
        self._a_stream = 0
        """How many drafts each stream may have."""
        self._num_streams = 0
        self._age = 0

    def begin(self, running: Series[Sequence]) -> None:
        """Called before a step for these streams is chosen."""
        self._age += 1
        if len(running) == self._num_streams and self._age < REPEATS:
            return
        self._num_streams, self._age = len(running), 0
        if not running:
            return
        contexts = [stream.next_position + 1 for stream in running]
        self._costs = self._curve(contexts)
        most, best_rate = 0, LEAST_PROMISE * len(contexts) / self._costs.seconds[0] if self._costs.seconds[0] else 0.0
        for count, seconds in zip(*self._costs, strict=True):
            if (rate := (len(contexts) + count) / seconds) > best_rate:
                most, best_rate = count, rate
        self._a_stream = min(self._max_drafts, -(-most // len(contexts)))

    def drafts(self, stream: Sequence, most: int) -> Drafts | None:
        """Returns how many drafts a stream may have. Near the end of its answer they are at most half of what is left
        of it: steps launched ahead need room, too."""
        if not self._a_stream:
            return None
        asked = stream.request.sampling.speculation
        most = min(most, self._a_stream, (stream.max_total_tokens - stream.next_position) // 2 - 1)
        if asked is not None:
            if asked.is_off or (asked.method is not None and asked.method not in self.methods):
                return None
            most = most if asked.max_drafts is None else min(most, asked.max_drafts)
        return Drafts(most) if most > 0 else None

    def costs(self) -> DraftCosts:
        return self._costs

    def _curve(self, contexts: list[int]) -> DraftCosts:
        """Returns the cost of each number of drafts, as if the streams had equally many: it hardly depends on whose
        they are."""
        num_streams = len(contexts)
        counts = _counts(num_streams * self._max_drafts)
        seconds = []
        for count in counts:
            share, rest = divmod(count, num_streams)
            queries = [1 + share + (index < rest) for index in range(num_streams)]
            work = StepWork(
                contexts=[context + query - 1 for context, query in zip(contexts, queries, strict=True)],
                queries=queries if count else (),
            )
            seconds.append(self._step_seconds(work))
        return DraftCosts(tuple(counts), tuple(seconds))


def _counts(most: int) -> list[int]:
    counts = [*range(min(most, EACH_UP_TO) + 1), *range(EACH_UP_TO + 4, min(most, IN_FOURS_UP_TO) + 1, 4)]
    while counts[-1] < most:
        counts.append(min(most, max(2 * counts[-1], IN_FOURS_UP_TO)))
    return counts
