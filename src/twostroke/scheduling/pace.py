"""How many prompt tokens fit beside running streams, so that none of them waits longer than the inter-token target.
A chunk's seconds are its arithmetic over the measured peak, divided by an efficiency that is learnt from finished
steps. Knows costs; knows nothing of queues or blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from twostroke.core.step import DecodeSlot, Step
from twostroke.cost.floor import contexts_bytes_read, prefill_multiply_adds
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape

FIRST_EFFICIENCY = 0.6
LEAST_EFFICIENCY, MOST_EFFICIENCY = 0.1, 1.0
LEARNING_RATE = 0.2
OUTLIER = 2.0
"""A step that took so many times what was expected was held up by something else (a kernel's first compilation, say):
it teaches a tenth of what others do."""
LEAST_TOKENS = 64
"""What a step with running streams may always prefill: prompts must move on, however tight the target."""
SOME_SECONDS = 1e-9
"""Never none, for the same reason."""
CROWD = 8.0
"""Where this many times the waiting prompts outnumber the streams, streams give way."""
FEW_WAITING, BURST = 4, 32.0
"""Prompts beyond a few that wait came in a burst, and count for more."""
LONG_WAIT = 4.0
"""A step that reads prompts for so many times the target is a burst's: chance arrivals hardly bring one about."""
ROUND_TOKENS = 128
"""Where the pace cuts a prompt, it leaves the step a multiple of so many tokens, decodes and all: few different sizes,
which is what matrix products and captured graphs like."""


class PrefillPace:
    def __init__(self, shape: ModelShape, ceilings: Ceilings, itl_target_s: float) -> None:
        if itl_target_s <= 0.0:
            raise ValueError(f"itl_target_s must be above 0, not {itl_target_s}")
        self.itl_target_s = itl_target_s
        self._shape = shape
        self._peak = ceilings.multiply_adds_per_s
        self._bandwidth = ceilings.read_bytes_per_s
        plain = replace(shape, decode_weights=None)  # which is what steps that are bound by arithmetic read
        self._weights_s = plain.weight_bytes_read(LEAST_TOKENS) / ceilings.read_bytes_per_s
        self._efficiency = FIRST_EFFICIENCY
        self._last_tokens, self._last_s = 0, 0.0

    @property
    def efficiency(self) -> float:
        return self._efficiency

    def seconds(self, start: int, num_tokens: int) -> float:
        """What a chunk from position `start` on should take."""
        return prefill_multiply_adds(self._shape, start, num_tokens) / (self._peak * self._efficiency)

    def seconds_for_prefill(self, decodes: Sequence[DecodeSlot], num_waiting: int, waiting_tokens: int) -> float:
        """What a step with these decodes may spend on prompts. A stream waits for its next token, a prompt for its
        first: where more prompts wait than an eighth of the streams, streams give way in proportion. That is also when
        large chunks pay, for a burst is read faster in few steps: once streams have waited long for it, its last
        prompts are read in steps as long, not in many small ones."""
        crowd = max(CROWD * num_waiting, BURST * (num_waiting - FEW_WAITING))
        target_s = self.itl_target_s * max(1.0, crowd / max(1, len(decodes)))
        allowed_s = max(SOME_SECONDS, target_s - self._decode_seconds(decodes))
        return max(allowed_s, self._last_s) if self._goes_on(num_waiting, waiting_tokens) else allowed_s

    def _goes_on(self, num_waiting: int, waiting_tokens: int) -> bool:
        """Whether the step before was a burst's, and what waits may be the rest of it: prompts that on average fit
        into another such step. A longer one would hold streams up for many steps, and is read at the usual pace."""
        return self._last_s >= LONG_WAIT * self.itl_target_s and waiting_tokens <= num_waiting * self._last_tokens

    def remember(self, num_tokens: int, seconds: float) -> None:
        """What the step planned last has of prompts, and for how long its streams were to wait for them; none for a
        step without prompts, or without streams."""
        self._last_tokens, self._last_s = num_tokens, seconds

    def _decode_seconds(self, decodes: Sequence[DecodeSlot]) -> float:
        """What decodes add to a step whose prompts read the weights anyway: their own arithmetic and their KV."""
        work = len(decodes) * (self._shape.layer_matmul_parameters + self._shape.head_matmul_parameters)
        kv_bytes = contexts_bytes_read(self._shape, [slot.position + 1 for slot in decodes])
        return work / (self._peak * self._efficiency) + kv_bytes / self._bandwidth

    def chunk_tokens(
        self, seconds: float, start: int, limit: int, num_decodes: int, num_planned: int, *, may_wait: bool = True
    ) -> int:
        """How much of `limit` tokens to take into a step that has so many decodes and prompt tokens already. Less than
        the limit: the step is full then. None only for a prompt that may wait, and never for the first of a step."""
        fits = self.tokens_within(seconds, start, limit)
        if fits == limit:
            return limit
        num_before = num_decodes + num_planned
        rounded = (num_before + fits) // ROUND_TOKENS * ROUND_TOKENS - num_before
        if num_planned > 0 and may_wait:
            return max(0, rounded)
        return rounded if rounded >= LEAST_TOKENS else max(fits, min(LEAST_TOKENS, limit))

    def has_room(self, seconds: float, num_decodes: int, num_planned: int) -> bool:
        """Whether one more prompt is worth beginning: whether the step can be filled up to its next round number."""
        needed = ROUND_TOKENS - (num_decodes + num_planned) % ROUND_TOKENS
        return num_planned == 0 or self.seconds(0, needed) <= seconds

    def tokens_within(self, seconds: float, start: int, limit: int) -> int:
        """The longest chunk from `start` on, up to `limit`, that should take no longer."""
        if limit <= 0 or self.seconds(start, limit) <= seconds:
            return limit
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds(start, middle) <= seconds:
                low = middle
            else:
                high = middle - 1
        return low

    def observe(self, step: Step, compute_s: float) -> None:
        """Learn from what a step took, unless it was too short to be bound by arithmetic."""
        if not step.prefills or compute_s <= 0.0:
            return
        work = sum(prefill_multiply_adds(self._shape, chunk.start, len(chunk.token_ids)) for chunk in step.prefills)
        if work / self._peak < self._weights_s:
            return
        measured = work / (self._peak * max(compute_s - self._decode_seconds(step.decodes), compute_s / 10))
        rate = LEARNING_RATE / 10 if measured * OUTLIER < self._efficiency else LEARNING_RATE
        learnt = self._efficiency + rate * (measured - self._efficiency)
        self._efficiency = min(MOST_EFFICIENCY, max(LEAST_EFFICIENCY, learnt))
