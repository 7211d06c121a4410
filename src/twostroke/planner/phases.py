"""The two phases of a load on one replica, in seconds: a prompt read, a token written alone or in company, and what
many users get who each ask again when answered. Knows no price and no memory."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.roofline import decode_work
from twostroke.planner.efficiency import Efficiency

CHUNK_TOKENS = 8192
"""A longer prompt is read in several steps, as the engine reads it on a GPU."""
CONTEXT_PAIRS = 4
"""A mean over an answer is taken at so many contexts from its beginning and as many from its end, in step: exact where
cost is linear in the context."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A steady state: so many users at once, each asking again when answered."""

    users: int
    prefill_s: float
    """Of one prompt, on the machine alone."""
    decode_step_s: float
    """Of one step of all users' streams, at the middle of their answers."""
    ttft_s: float
    tpot_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt tokens among them, cached ones too."""
    prefill_share: float
    """Of the machine's seconds."""


@dataclass(frozen=True, slots=True)
class Phases:
    shape: ModelShape
    ceilings: Ceilings
    efficiency: Efficiency
    reduce_s_per_layer: float = 0.0
    """What the devices of one replica spend on adding up their parts, a layer: of a step of any size."""
    reduce_s_per_token: float = 0.0
    """And a token, over all layers."""

    def step_s(self, work: StepWork) -> float:
        num_layers = sum(group.num_layers for group in self.shape.kv_groups)
        shared = num_layers * self.reduce_s_per_layer + work.num_tokens * self.reduce_s_per_token
        return self.efficiency.step_seconds(self.shape, work, self.ceilings) + shared

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """To read so many tokens after `start` cached ones and to give the first token."""
        seconds, end = 0.0, start + num_tokens
        for first in range(start, end, CHUNK_TOKENS):
            length = min(CHUNK_TOKENS, end - first)
            seconds += self.step_s(StepWork(chunks=((first, length),), num_sampling_chunks=int(first + length == end)))
        return seconds

    def tpot_s(self, input_tokens: int, output_tokens: int, batch: int) -> float:
        """The mean over an answer's tokens after the first, in a batch of streams that are as far as it is."""
        first, last = input_tokens + 1, input_tokens + max(2, output_tokens) - 1
        offsets = [(last - first) * index // (2 * CONTEXT_PAIRS - 1) for index in range(CONTEXT_PAIRS)]
        contexts = [context for offset in offsets for context in (first + offset, last - offset)]
        return sum(self.step_s(decode_work(batch, context)) for context in contexts) / len(contexts)

    def loaded(self, input_tokens: int, output_tokens: int, cached_tokens: int, users: int) -> Loaded:
        """While one stream writes its answer, every other user's prompt is read once: in the time of `output` steps of
        all streams, all prompts go by too. A prompt waits for others as in a queue with one server and random arrivals
        (M/D/1), which burstier arrivals make longer: percentiles are the simulator's to tell."""
        prefill_s = self.prefill_s(cached_tokens, input_tokens - cached_tokens)
        step_s = self.tpot_s(input_tokens, output_tokens, users)
        steps = max(1, output_tokens - 1)
        round_s = steps * step_s + users * prefill_s
        share = users * prefill_s / round_s
        waiting_s = 0.0 if users == 1 else share * prefill_s / (2 * (1 - share))
        others_s = (users - 1) * prefill_s
        requests_per_s = users / round_s
        return Loaded(
            users=users,
            prefill_s=prefill_s,
            decode_step_s=step_s,
            ttft_s=prefill_s + min(waiting_s, others_s),
            tpot_s=step_s + others_s / steps,
            requests_per_s=requests_per_s,
            output_tokens_per_s=requests_per_s * output_tokens,
            total_tokens_per_s=requests_per_s * (input_tokens + output_tokens),
            prefill_share=share,
        )
