"""A step on its way, and what applying it did for a sequence, for whoever tells its caller. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.core.sequence import Sequence
from twostroke.core.step import DecodeSlot, PrefillChunk, SampledToken, Step, StepResult, TokenLogprobs

NO_TOKEN = "the backend returned no token"
NO_VECTOR = "the backend returned no vector"
TOO_MANY_TOKENS = "the backend returned more tokens than were asked for"


@dataclass(slots=True)
class SequenceAdvance:
    """What one step did for one sequence. (Not frozen: one is made for every token, and read once.)"""

    sequence: Sequence
    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    prefill_computed: int | None = None
    """Positions computed, of `sequence.prefill_len`, when the step held a chunk of it."""
    finished: bool = False
    """Its `finish_reason` and `error` say why."""
    vector: bytes | None = None
    """Of a request for one, which is finished with it."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose result has not come back."""

    step: Step
    sequences: dict[int, Sequence]
    reading_s: float
    """Predicted for its prompts, each alone."""


def land(sequence: Sequence, work: PrefillChunk | DecodeSlot) -> None:
    """It is in flight no more, whatever came of it."""
    if isinstance(work, PrefillChunk):
        sequence.num_in_flight -= len(work.token_ids)
    else:
        sequence.num_in_flight -= work.num_queries
        sequence.num_drafts_in_flight -= work.num_queries - 1


def chunk_fault(chunk: PrefillChunk, result: StepResult) -> str | None:
    """What is wrong with what came back for a chunk; None: nothing."""
    if (error := result.errors.get(chunk.seq_id)) is not None:
        return error
    num_sampled = len(result.sampled.get(chunk.seq_id, ())) if chunk.samples else 1
    if num_sampled != 1:
        return TOO_MANY_TOKENS if num_sampled else NO_TOKEN
    return NO_VECTOR if chunk.pools and chunk.seq_id not in result.vectors else None
