"""When things happened to one sample, in seconds on the engine's monotonic clock. `docs/metrics.md` defines each."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SequenceTiming:
    arrival_s: float = 0.0
    scheduled_s: float | None = None
    """When its first prefill chunk was launched."""
    token_times_s: list[float] = field(default_factory=list)
    """When the engine learned each output token."""
    finished_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache, at first admission."""
    recomputed_tokens: int = 0
    """Tokens computed again because of preemption."""
    prefill_chunks: int = 0
    preemptions: int = 0
    prefill_compute_s: float = 0.0
    """Backend seconds of the steps that held one of its chunks."""
    decode_compute_s: float = 0.0
    """Backend seconds of the steps that held its decode slot."""

    @property
    def first_token_s(self) -> float | None:
        return self.token_times_s[0] if self.token_times_s else None

    @property
    def queue_s(self) -> float | None:
        """Arrival to the launch of the first chunk."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def prefill_s(self) -> float | None:
        """Launch of the first chunk to the first token: TTFT less the queue."""
        if self.first_token_s is None or self.scheduled_s is None:
            return None
        return self.first_token_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """First token to last token."""
        return self.token_times_s[-1] - self.token_times_s[0] if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (last - first) / (n - 1)."""
        count = len(self.token_times_s)
        return None if count < 2 else (self.token_times_s[-1] - self.token_times_s[0]) / (count - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between one token and the next."""
        return [b - a for a, b in zip(self.token_times_s, self.token_times_s[1:], strict=False)]
