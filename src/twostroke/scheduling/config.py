"""What the scheduler may be told. Frozen; checked when made."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.kv.snapshots import SNAPSHOT_TOKENS


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_context: int
    """Prompt plus output of one sequence, at most."""
    max_tokens_per_step: int = 512
    """Decode slots and prefill tokens of one step together."""
    max_running: int = 64
    """Sequences that hold a backend row at a time."""
    max_chunk_tokens: int | None = None
    """The most prompt tokens of one sequence in one step; None: whatever the step has left."""
    whole_prompts: bool = False
    """A prompt is read in one chunk, as the model's tokens see each other both ways, or are all pooled."""
    prefix_caching: bool = True
    """Off: only the samples of one request share blocks."""
    snapshot_tokens: int = SNAPSHOT_TOKENS
    """Between two snapshots of a sequence's states, at least."""
    kv_watermark: float = 0.01
    """The share of each KV group that admission leaves to the streams already running."""
    priority_aging_s: float = 30.0
    """What one level of priority is worth: a request passes one that is a level below it unless that one has waited
    this much longer. So nothing waits forever, however urgent the newcomers are."""

    def __post_init__(self) -> None:
        for name in ("max_context", "max_tokens_per_step", "max_running", "snapshot_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise ValueError(f"max_chunk_tokens must be at least 1, not {self.max_chunk_tokens}")
        if self.whole_prompts and (self.max_chunk_tokens is not None or self.prefix_caching):
            raise ValueError("prompts that are read whole are not cut into chunks, and nothing of them is found again")
        if not 0.0 <= self.kv_watermark < 1.0:
            raise ValueError(f"kv_watermark must be from 0 to below 1, not {self.kv_watermark}")
        if self.priority_aging_s < 0.0:
            raise ValueError(f"priority_aging_s must not be negative, not {self.priority_aging_s}")

    @property
    def running_limit(self) -> int:
        """Every running stream gets its slot in every step, so no more may run than a step has tokens."""
        return min(self.max_running, self.max_tokens_per_step)

    @property
    def chunk_limit(self) -> int:
        return min(self.max_chunk_tokens or self.max_tokens_per_step, self.max_tokens_per_step)
