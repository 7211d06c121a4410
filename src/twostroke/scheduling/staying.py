"""Whether a prompt is read where its answer is written, or by another engine first: short prompts, and those whose
beginning is there, are not worth a handoff. A simulated router and a worker that reads decide by this one rule. Knows
costs; knows neither queues nor links."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twostroke.core.service_level import ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.scheduling.forecast import StepSeconds
from twostroke.scheduling.pace import PROMISED_SHARE

GAP_GROWTH = 2.0
"""Where no gap is promised or aimed at, or nobody says which streams a writer has, a stream's gap may grow this many
times for a prompt that is read beside it."""


class Writer(NamedTuple):
    """What is known of the engine that would write."""

    num_cached: int
    """Of the prompt's tokens, that are there."""
    reading_s: float
    """Predicted, to read the others alone."""
    contexts: Sequence[int] | None
    """Of the streams there: their lengths. None: nobody says. A stream as long as the prompt is taken then, and a
    promised gap does not say how far it may be held up: there may be many of them."""
    ahead_s: float = 0.0
    """Of prompts that are read there before."""


class Staying:
    def __init__(
        self,
        step_seconds: StepSeconds,
        max_tokens_per_step: int,
        block_size: int,
        levels: ServiceLevels,
        itl_target_s: float | None,
    ) -> None:
        """`itl_target_s`: what a gap is to be where none is promised; None: nobody says."""
        self._step_seconds, self._max_tokens, self._block_size = step_seconds, max_tokens_per_step, block_size
        promised = [level.itl_s for level in levels.levels if level.itl_s is not None]
        self._gap_s = PROMISED_SHARE * min(promised) if promised else itl_target_s

    def stays(self, prompt_tokens: int, writer: Writer, elsewhere_s: float) -> bool:
        """Read at the writer: no stream there waits longer than it may, or would in any case, and the first token comes
        no later than in `elsewhere_s`, by way of the other engine."""
        contexts = [prompt_tokens] if writer.contexts is None else writer.contexts
        step_s = self._reading_s(writer.num_cached, prompt_tokens, contexts)
        if contexts:
            limit_s = self._limit_s(contexts, is_known=writer.contexts is not None)
            if step_s > limit_s and step_s > self.first_step_s(prompt_tokens, contexts):
                return False
        return writer.ahead_s + max(writer.reading_s, step_s) <= elsewhere_s

    def _limit_s(self, contexts: Sequence[int], *, is_known: bool) -> float:
        """What a step beside these streams may take."""
        streams_s = self._step_seconds(StepWork(contexts=contexts))
        if self._gap_s is None:
            return GAP_GROWTH * streams_s
        limit_s = max(self._gap_s, streams_s)
        return limit_s if is_known else min(limit_s, GAP_GROWTH * streams_s)

    def first_step_s(self, prompt_tokens: int, contexts: Sequence[int] | None) -> float:
        """Of the writer, when it has all that is handed over: whole blocks."""
        whole = (prompt_tokens - 1) // self._block_size * self._block_size
        return self._reading_s(whole, prompt_tokens, [prompt_tokens] if contexts is None else contexts)

    def added_s(self, prompt_tokens: int) -> float:
        """What a prompt that is handed over takes of a writer beside a stream, for what no block of it holds."""
        return self.first_step_s(prompt_tokens, None) - self._step_seconds(StepWork(contexts=[prompt_tokens]))

    def _reading_s(self, start: int, end: int, contexts: Sequence[int]) -> float:
        """A step that reads these tokens, as many as it may, beside these streams."""
        return self._step_seconds(StepWork(((start, min(end - start, self._max_tokens)),), 1, contexts=contexts))
