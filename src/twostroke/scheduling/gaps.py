"""Decides whether running streams keep their promised gaps with one more stream, and whether that one has its own. A
newcomer that would make steps too long waits until others have ended. Knows what steps cost and what was promised;
knows no queue.

Progress: if nobody writes, everybody is let in, and those who write come to an end. A promise holds nobody back once it
cannot be kept, because the hardware is too slow even for one stream, or because the newcomer would wait longer than its
own first token may."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Series
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from twostroke.core.sequence import Sequence
from twostroke.core.service_level import most_streams, streams_fit
from twostroke.cost.floor import StepWork
from twostroke.scheduling.forecast import Forecast, nominal_seconds
from twostroke.scheduling.policies.slack import UNPROMISED_S
from twostroke.scheduling.promises import Promises

STEPS_TO_JOIN = 2
"""Steps between the end of a stream and the first token of another in its place: the step in flight, and its own."""
IN_HAND = 0.1
"""The share of the promised time to a first token that is kept in reserve, because predictions are off."""
MOST_BEHIND = 16
"""How many of those that wait behind a newcomer that is held back are looked at."""


class Gaps:
    def __init__(self, promises: Promises, forecast: Forecast, *, holds: bool = True) -> None:
        """`holds` says whether the policy looks at promises."""
        self._promises = promises
        self._forecast = forecast
        self._may_hold = holds and promises.bounds_gaps
        self._lost: set[int] = set()
        """Running sequences that were let in although steps were too long for them. Their promises hold back nobody
        else."""

    @property
    def may_hold(self) -> bool:
        """Whether anybody may ever have to wait for this: gaps are promised, and the cost of steps is known."""
        return self._may_hold and self._forecast.step_seconds is not nominal_seconds

    def holds(
        self, newcomer: Sequence, running: Iterable[Sequence], now_s: float, waiting: Iterable[Sequence] = ()
    ) -> bool:
        """Whether a newcomer has to wait until some of the running sequences have ended. `waiting` are those that wait
        with it, about in the order in which they will be read. Nobody passes it."""
        if not self.may_hold or not _writes(newcomer):
            return False
        streams = [one for one in running if _writes(one)]
        if not streams:
            return False
        together_s = self._step_s([*streams, newcomer])
        if not streams_fit(together_s, self._tightest_s(streams)):
            return True
        if streams_fit(together_s, self._own_s(newcomer)):
            return False
        step_s = max(together_s, self._forecast.step_s.value)
        again_s = now_s + (1 + STEPS_TO_JOIN) * step_s  # this is asked again a step later
        return again_s <= self._waits_until_s(newcomer) and not self._holds_up(newcomer, waiting, now_s, again_s)

    def let_in(self, newcomer: Sequence, running: Iterable[Sequence]) -> None:
        """Notes that a newcomer joins the running sequences."""
        if self.may_hold and (own_s := self._promises.itl_s(newcomer)) < inf and _writes(newcomer):
            together = [*(one for one in running if _writes(one)), newcomer]
            if not streams_fit(self._step_s(together), own_s):
                self._lost.add(newcomer.seq_id)

    def forget(self, seq_id: int) -> None:
        """Notes that a sequence does not run any more."""
        self._lost.discard(seq_id)

    def alone_s(self, newcomer: Sequence) -> float:
        """Returns the seconds of its gaps if it runs alone. 0 means that it has none, or that nobody knows."""
        return self._step_s([newcomer]) if self.may_hold and _writes(newcomer) else 0.0

    def most_alike(self, newcomer: Sequence, number: int) -> int:
        """Returns how many of `number` sequences like it may write beside each other, if nobody else does."""
        own_s = self._own_s(newcomer) if self.may_hold and _writes(newcomer) else inf
        if own_s == inf:
            return number
        context, step_seconds = _context(newcomer), self._forecast.step_seconds
        return most_streams(own_s, number, lambda several: step_seconds(StepWork(contexts=[context] * several)))

    def wait_s(
        self,
        newcomer: Sequence,
        ahead: int,
        running: Iterable[Sequence],
        more_tokens: Callable[[Sequence], int],
    ) -> float:
        """Returns the seconds until a newcomer may write beside those who are left then, if `ahead` others go before
        it. It counts the tokens that each stream will still write, one a step, as if all had contexts of the same
        length."""
        if not self.may_hold or not _writes(newcomer):
            return 0.0
        streams = [one for one in running if _writes(one)]
        limit_s = min(self._tightest_s(streams), self._own_s(newcomer))
        if limit_s == inf:
            return 0.0
        contexts = [_context(one) for one in (*streams, newcomer)]
        length = sum(contexts) // len(contexts)

        def step_s(number: int) -> float:
            return self._forecast.step_seconds(StepWork(contexts=[length] * number))

        most = max(1, most_streams(limit_s, len(streams) + ahead + 1, step_s))
        ends = [more_tokens(one) for one in streams]  # in steps from now
        answers = [one.num_output + left for one, left in zip(streams, ends, strict=True)] or [more_tokens(newcomer)]
        answer, begins = sum(answers) // len(answers), 0
        heapify(ends)
        for _ in range(ahead + 1):
            while len(ends) >= most:
                begins = heappop(ends)
            heappush(ends, begins + answer)
        return (begins + STEPS_TO_JOIN) * step_s(most) if begins else 0.0

    def _tightest_s(self, streams: Series[Sequence]) -> float:
        """Returns the shortest gap promised to one of these streams, among the gaps that can be kept."""
        shortest: dict[float, int] = {}  # by promise, the context of the shortest stream that has it
        for one in streams:
            itl_s = self._promises.itl_s(one)
            if itl_s < inf and one.seq_id not in self._lost:
                shortest[itl_s] = min(shortest.get(itl_s, _context(one)), _context(one))
        step_seconds = self._forecast.step_seconds
        kept = (itl_s for itl_s in sorted(shortest) if streams_fit(step_seconds(_alone(shortest[itl_s])), itl_s))
        return next(kept, inf)

    def _own_s(self, newcomer: Sequence) -> float:
        """Returns the gap that it was promised, if that can be kept at all."""
        own_s = self._promises.itl_s(newcomer)
        return own_s if own_s < inf and streams_fit(self._step_s([newcomer]), own_s) else inf

    def _holds_up(self, newcomer: Sequence, waiting: Iterable[Sequence], now_s: float, again_s: float) -> bool:
        """Whether a sequence behind it that is in time now would be late."""
        before_s = self._forecast.stretch * self._forecast.reading_s(newcomer)
        behind = (one for one in waiting if one is not newcomer and not one.num_output)
        for one in islice(behind, MOST_BEHIND):
            until_s = self._waits_until_s(one) - before_s
            if now_s <= until_s < again_s:
                return True
            before_s += self._forecast.stretch * self._forecast.reading_s(one)
        return False

    def _waits_until_s(self, newcomer: Sequence) -> float:
        """Returns when it is let in even if steps are too long for it, because it would break another promise of its
        own. If that promise is broken already, or was never given, it waits no longer than a request without
        promises."""
        if newcomer.num_output:
            return -inf  # each moment that it waits is part of a gap
        promise = newcomer.timing.promise
        ttft_s = None if promise is None else promise.ttft_s
        due_s = newcomer.request.asked_s + (1.0 - IN_HAND) * (UNPROMISED_S if ttft_s is None else ttft_s)
        return self._forecast.last_start_s(newcomer, due_s)

    def _step_s(self, streams: Series[Sequence]) -> float:
        return self._forecast.step_seconds(StepWork(contexts=[_context(one) for one in streams]))


def _writes(sequence: Sequence) -> bool:
    """Whether it will write more than one token, and so has gaps."""
    return not sequence.request.wants_vector and sequence.max_total_tokens > sequence.prompt_len + 1


def _context(sequence: Sequence) -> int:
    return max(len(sequence.tokens), sequence.next_position) + 1


def _alone(context: int) -> StepWork:
    return StepWork(contexts=[context])
