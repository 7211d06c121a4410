"""The two phases of a load on one replica, in seconds: a prompt read, a token written alone or in company, and what
many users get who each ask again when answered. Knows no price and no memory."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import ModelShape
from twostroke.cost.roofline import decode_work
from twostroke.planner.efficiency import Efficiency
from twostroke.planner.speculating import Speculating

CHUNK_TOKENS = 8192
"""A longer prompt is read in several steps, as the engine reads it on a GPU."""
CONTEXT_PAIRS = 4
"""A mean over an answer is taken at this many contexts from its beginning and as many from its end: exact where
cost is linear in the context."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A steady state: `users` users at once, each asking again when answered."""

    users: int
    prefill_s: float
    """Of one prompt, alone: on all stages together, however many work at once."""
    decode_step_s: float
    """Of one step of all users' streams (of a lane's), at the middle of their answers."""
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
    link_s_per_step: float = 0.0
    """What the devices of one replica spend on each other: of a step of any size."""
    link_s_per_token: float = 0.0
    """Seconds on the link for each token of a step."""
    stages: int = 1
    """That a step goes through, each with its part of the layers."""
    lanes: int = 1
    """Steps that go on at the same time, each for its part of the users."""
    unevenness: float = 1.0
    """How many times the mean the slowest stage takes: where all stages are busy, the others wait for it."""
    speculating: Speculating | None = None
    """Of the drafts that it allows, as many are computed as pay."""

    def step_s(self, work: StepWork) -> float:
        """From the first stage to the last."""
        shared = self.link_s_per_step + work.num_tokens * self.link_s_per_token
        return self.efficiency.step_seconds(self.shape, work, self.ceilings) + shared

    def token_s(self, work: StepWork) -> float:
        """The same; of a step that only writes, for each token that it brings a stream."""
        return self.step_s(work) if self.speculating is None else self.speculating.a_token(self.step_s)(work)

    def _chunks_s(self, start: int, num_tokens: int) -> list[float]:
        end = start + num_tokens
        works = [
            StepWork(((first, min(CHUNK_TOKENS, end - first)),), int(first + CHUNK_TOKENS >= end))
            for first in range(start, end, CHUNK_TOKENS)
        ]
        return [self.step_s(work) for work in works]

    def prefill_s(self, start: int, num_tokens: int) -> float:
        """To read `num_tokens` tokens after `start` cached ones and to give the first token. Chunks follow each other
        through the stages: the last one leaves when all have passed a stage, and the longest the others."""
        seconds = self._chunks_s(start, num_tokens)
        return (sum(seconds) + (self.stages - 1) * max(seconds, default=0.0)) / self.stages

    def ttft_alone_s(self, cached_tokens: int, num_tokens: int) -> float:
        """The same, and what a request takes beside its steps where it is the only one."""
        return self.prefill_s(cached_tokens, num_tokens) + self.efficiency.newcomer_seconds(cached_tokens + num_tokens)

    def tpot_s(self, input_tokens: int, output_tokens: int, batch: int) -> float:
        """The mean over an answer's tokens after the first, in a batch of streams that are as far as it is."""
        return self._decode(input_tokens, output_tokens, batch)[0]

    def _decode(self, input_tokens: int, output_tokens: int, batch: int) -> tuple[float, float]:
        """The mean seconds of a token, and of a step."""
        first, last = input_tokens + 1, input_tokens + max(2, output_tokens) - 1
        offsets = [(last - first) * index // (2 * CONTEXT_PAIRS - 1) for index in range(CONTEXT_PAIRS)]
        contexts = [context for offset in offsets for context in (first + offset, last - offset)]
        tokens_s, steps_s = zip(*(self._decode_at(context, batch) for context in contexts), strict=True)
        return sum(tokens_s) / len(contexts), sum(steps_s) / len(contexts)

    def _decode_at(self, context: int, batch: int) -> tuple[float, float]:
        if self.speculating is None:
            step_s = self.step_s(decode_work(batch, context))
            return step_s, step_s
        count, step_s = self.speculating.best(self.step_s, [context] * batch)
        return step_s / self.speculating.tokens(count), step_s

    def loaded(self, input_tokens: int, output_tokens: int, cached_tokens: int, users: int) -> Loaded:
        """While one stream writes its answer, every other user's prompt is read once: in the time of `output` steps of
        all streams, all prompts go by too. A prompt waits for others as in a queue with one server and random arrivals
        (M/D/1), which burstier arrivals make longer: percentiles are the simulator's to tell.

        With lanes, each has its part of the users, and takes as long as a machine would that had a stage's devices for
        the whole model; but there are `lanes` of them."""
        a_lane = -(-users // self.lanes)
        slowest = self.unevenness if users >= self.lanes else 1.0
        read = self.ttft_alone_s if users == 1 else self.prefill_s
        passing_s = read(cached_tokens, input_tokens - cached_tokens)
        prefill_s = slowest * sum(self._chunks_s(cached_tokens, input_tokens - cached_tokens))
        token_s, step_s = (slowest * seconds for seconds in self._decode(input_tokens, output_tokens, a_lane))
        tokens = max(1, output_tokens - 1)
        round_s = tokens * token_s + a_lane * prefill_s
        share = a_lane * prefill_s / round_s
        waiting_s = 0.0 if users == 1 else share * prefill_s / self.stages / (2 * (1 - share))
        others_s = (a_lane - 1) * prefill_s
        requests_per_s = users / round_s
        return Loaded(
            users=users,
            prefill_s=prefill_s,
            decode_step_s=step_s,
            ttft_s=passing_s + min(waiting_s, (users - 1) * prefill_s / self.lanes),
            tpot_s=token_s + others_s / tokens,
            requests_per_s=requests_per_s,
            output_tokens_per_s=requests_per_s * output_tokens,
            total_tokens_per_s=requests_per_s * (input_tokens + output_tokens),
            prefill_share=share,
        )
