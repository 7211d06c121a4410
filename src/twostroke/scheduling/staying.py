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
"""Where no gap is promised or aimed at, a stream's gap may grow this many times for a prompt that is read beside it."""


class Writer(NamedTuple):
    """What is known of the engine that would write."""

    num_cached: int
    """Of the prompt's tokens, that are there."""
    reading_s: float
    """Predicted, to read the others alone."""
    contexts: Sequence[int]
    """Of the streams there: their lengths."""
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
        contexts = writer.contexts
        step_s = self._reading_s(writer.num_cached, prompt_tokens, contexts)
        if contexts:
            streams_s = self._step_seconds(StepWork(contexts=contexts))
            limit_s = GAP_GROWTH * streams_s if self._gap_s is None else max(self._gap_s, streams_s)
            if step_s > limit_s and step_s > self.first_step_s(prompt_tokens, contexts):
                return False
        return writer.ahead_s + max(writer.reading_s, step_s) <= elsewhere_s

    def first_step_s(self, prompt_tokens: int, contexts: Sequence[int]) -> float:
        """Of the writer, when it has all that is handed over: whole blocks."""
        whole = (prompt_tokens - 1) // self._block_size * self._block_size
        return self._reading_s(whole, prompt_tokens, contexts)

    def _reading_s(self, start: int, end: int, contexts: Sequence[int]) -> float:
        """A step that reads these tokens, as many as it may, beside these streams."""
        return self._step_seconds(StepWork(((start, min(end - start, self._max_tokens)),), 1, contexts=contexts))
