"""What is kept of a finished step, for anyone who asks later where a request's time went. Plain numbers: no token, no
sequence. Totals run on from step to step, so the difference of two of them is what lay between."""

from __future__ import annotations

from typing import NamedTuple


class StepTotals(NamedTuple):
    """Sums over all steps of an engine so far."""

    steps: int = 0
    compute_s: float = 0.0
    prefill_tokens: int = 0
    decode_slots: int = 0
    context_tokens: int = 0
    """Sum over decode slots: how many tokens the slot's sequence had, the one that enters included."""
    decode_only_steps: int = 0
    decode_only_s: float = 0.0
    others_s: float = 0.0
    """The part of `compute_s` that other programs took of the cores meanwhile."""
    drafts_computed: int = 0
    drafts_held: int = 0
    """Drafts that held: tokens beyond the one that each decode slot brings anyway."""

    def since(self, earlier: StepTotals) -> StepTotals:
        return StepTotals(*(mine - theirs for mine, theirs in zip(self, earlier, strict=True)))  # type: ignore[arg-type]

    @property
    def mixed_steps(self) -> int:
        """How many steps held a prefill chunk, whatever else they held."""
        return self.steps - self.decode_only_steps

    @property
    def others_share(self) -> float:
        """The share of the cores' time that other programs took in these steps."""
        return self.others_s / self.compute_s if self.compute_s > 0.0 else 0.0

    @property
    def decode_tokens(self) -> int:
        return self.decode_slots + self.drafts_held

    @property
    def mixed_s(self) -> float:
        return self.compute_s - self.decode_only_s

    @property
    def stream_step_s(self) -> float | None:
        """Mean seconds of a step without prompts. None means that there was none."""
        return self.decode_only_s / self.decode_only_steps if self.decode_only_steps else None

    @property
    def reading_s(self) -> float:
        """Seconds that reading prompts took: those of steps with prefill, less what their decode slots alone would have
        taken."""
        return max(0.0, self.mixed_s - self.mixed_steps * (self.stream_step_s or 0.0))

    @property
    def mean_context(self) -> float | None:
        """Mean number of tokens that a stream had. None means that there was no stream."""
        return self.context_tokens / self.decode_slots if self.decode_slots else None


class StepRecord(NamedTuple):
    began_s: float
    """When the backend could begin: the step was launched, and the step before had come back."""
    done_s: float
    """When its result was applied: the time of the tokens that it brought."""
    compute_s: float
    prefill_tokens: int
    num_chunks: int
    num_decodes: int
    context_tokens: int
    totals: StepTotals
    """The totals up to this step, itself included."""


class ChunkRecord(NamedTuple):
    """One prefill chunk of a sample, and the step that computed it."""

    start: int
    num_tokens: int
    step: StepRecord
