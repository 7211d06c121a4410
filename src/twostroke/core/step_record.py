"""What is kept of a finished step, for whoever asks later where a request's time went. Plain numbers: no token, no
sequence. Sums run on from step to step, so what lay between two steps is the difference of theirs."""

from __future__ import annotations

from typing import NamedTuple


class StepTotals(NamedTuple):
    """Over all steps of an engine so far."""

    steps: int = 0
    compute_s: float = 0.0
    prefill_tokens: int = 0
    decode_slots: int = 0
    context_tokens: int = 0
    """Of decode slots: the tokens known, the one that enters among them."""
    decode_only_steps: int = 0
    decode_only_s: float = 0.0
    others_s: float = 0.0
    """Of `compute_s`, as much as other programs took of the cores meanwhile."""
    drafts_computed: int = 0
    drafts_held: int = 0
    """Tokens beyond one a decode slot."""

    def since(self, earlier: StepTotals) -> StepTotals:
        return StepTotals(*(mine - theirs for mine, theirs in zip(self, earlier, strict=True)))  # type: ignore[arg-type]

    @property
    def mixed_steps(self) -> int:
        """Steps that held a prefill chunk, whatever else."""
        return self.steps - self.decode_only_steps

    @property
    def others_share(self) -> float:
        """Of the cores' time in these steps."""
        return self.others_s / self.compute_s if self.compute_s > 0.0 else 0.0

    @property
    def decode_tokens(self) -> int:
        return self.decode_slots + self.drafts_held

    @property
    def mixed_s(self) -> float:
        return self.compute_s - self.decode_only_s

    @property
    def stream_step_s(self) -> float | None:
        """What a step without prompts took; None: there was none."""
        return self.decode_only_s / self.decode_only_steps if self.decode_only_steps else None

    @property
    def reading_s(self) -> float:
        """What went into prompts: the seconds of steps with prefill, less what their slots alone would have taken."""
        return max(0.0, self.mixed_s - self.mixed_steps * (self.stream_step_s or 0.0))

    @property
    def mean_context(self) -> float | None:
        """Tokens that a stream knew; None: there was no stream."""
        return self.context_tokens / self.decode_slots if self.decode_slots else None


class StepRecord(NamedTuple):
    began_s: float
    """When the backend could begin: it was launched, and the step before had come back."""
    done_s: float
    """When its result was applied: the time of the tokens that it brought."""
    compute_s: float
    prefill_tokens: int
    num_chunks: int
    num_decodes: int
    context_tokens: int
    totals: StepTotals
    """This step included."""


class ChunkRecord(NamedTuple):
    """One prefill chunk of a sample, and the step that computed it."""

    start: int
    num_tokens: int
    step: StepRecord
