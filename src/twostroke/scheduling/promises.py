"""What each request is promised, and the refusal of one whose promise cannot be kept. A class says what it promises.
The default one, where nobody said it, promises what the hardware does for everybody, request by request. Knows
forecasts; knows nothing of queues."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from twostroke.core.errors import PromiseError
from twostroke.core.sequence import Sequence
from twostroke.core.service_level import DEFAULT_LEVEL, Promise, ServiceLevel, ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.scheduling.forecast import Forecast, nominal_seconds

DERIVED_TTFT = 4.0
"""Where nobody said what is promised, a first token comes within this many times what reading the prompt takes alone,
behind one full step."""
DERIVED_ITL = 2.0
"""Likewise, a gap is no longer than this many full steps: what costs no throughput to keep."""


class Promises:
    def __init__(self, levels: ServiceLevels, forecast: Forecast, max_tokens_per_step: int) -> None:
        self.levels = levels
        self.forecast = forecast
        self._itl_s = {level.name: level.itl_s for level in levels.levels if level.itl_s is not None}
        self._full_step = StepWork(((0, max_tokens_per_step),), 1)

    @property
    def bounds_gaps(self) -> bool:
        """Whether any class promises gaps, by what somebody said."""
        return bool(self._itl_s)

    def itl_s(self, sequence: Sequence) -> float:
        """The gap that its class was promised; what is derived bounds nothing. Infinite: none was."""
        return self._itl_s.get(sequence.request.service_level or DEFAULT_LEVEL, inf)

    def promise_to(self, level: ServiceLevel, reading_s: float) -> Promise:
        """A request of this class whose prompt takes so long to read."""
        if not level.is_derived or self.forecast.step_seconds is nominal_seconds:
            return level.promise
        full_s = self.forecast.step_seconds(self._full_step)
        return Promise(level.name, DERIVED_TTFT * (full_s + reading_s), DERIVED_ITL * full_s)

    def tightest_itl_s(self, streams: Iterable[Sequence]) -> float:
        """The shortest gap that a class of these was promised; what is derived bounds no step. Infinite: none was."""
        if not self._itl_s:
            return inf
        levels = {sequence.request.service_level or DEFAULT_LEVEL for sequence in streams}
        return min((self._itl_s[name] for name in levels if name in self._itl_s), default=inf)

    def refuse_uneven(self, level: ServiceLevel, alone_s: float) -> None:
        """Raises PromiseError where the class refuses, and promises gaps that this stream's are not within even
        alone."""
        if level.when_late == "refuse" and level.itl_s is not None and self.forecast.at_least_s(alone_s) > level.itl_s:
            raise PromiseError(
                f"the class {level.name} promises gaps of {level.itl_s * 1e3:.3g} ms, and a token of this answer takes "
                f"{alone_s * 1e3:.3g} with nobody beside it: another class may take it",
                inf,
            )

    def refuse_late(
        self, level: ServiceLevel, predicted_s: float, alone_s: float = 0.0, num_samples: int = 1, gone_s: float = 0.0
    ) -> None:
        """Raises PromiseError where the class refuses rather than to be late, and this one would be, also if it comes
        sooner than predicted by as much as predictions are known to be off. `gone_s`: what has gone by of its time at
        another engine. What is in the way drains by a second a second, here and there, so the same request is in time
        once that much is gone; never, where `alone_s`, what its own prompt and samples take with nobody there, is
        longer than was promised."""
        if level.when_late != "refuse" or level.ttft_s is None:
            return
        least_s = self.forecast.at_least_s(predicted_s)
        if not least_s or gone_s + least_s <= level.ttft_s:
            return
        if self.forecast.at_least_s(alone_s) > level.ttft_s:
            what = "reading this prompt" if num_samples == 1 else f"beginning {num_samples} answers"
            raise PromiseError(
                f"the class {level.name} promises a first token in {level.ttft_s * 1e3:.3g} ms, and {what} alone takes "
                f"{alone_s * 1e3:.3g}: another class may take it",
                inf,
            )
        first_token_s = gone_s + predicted_s
        retry_after_s = first_token_s - level.ttft_s
        there = f" ({gone_s * 1e3:.0f} of it went by at another engine)" if gone_s else ""
        raise PromiseError(
            f"the class {level.name} promises a first token in {level.ttft_s * 1e3:.0f} ms, and it would come in "
            f"{first_token_s * 1e3:.0f}{there}: what is before it takes that long; try again in {retry_after_s:.1f} s",
            retry_after_s,
        )
