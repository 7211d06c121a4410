"""How large blocks and steps are. A backend says what suits it; what the user asks for wins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSizes:
    block_size: int
    """Tokens in a KV block."""
    max_tokens_per_step: int
    """The most decode slots and prefill tokens that one step may have together."""
    max_running: int
    """The most sequences that run at a time."""
    itl_target_ms: float | None = None
    """How long a step with prefill may keep running streams waiting. None means that only its number of tokens is
    bounded."""
