"""What penalties need to know of a row: which tokens were seen, and how often each was written. Grows by one token at a
time and costs as much as there are distinct tokens seen, never the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twostroke.core.sampling_params import SamplingParams

FLOAT32_MAX = float(np.finfo(np.float32).max)


class SeenTokens:
    """Repetition penalty looks at prompt and output; presence and frequency penalties at the output alone."""

    def __init__(
        self, sampling: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._repetition = sampling.repetition_penalty
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        from_prompt = sorted(set(prompt_token_ids)) if self._repetition != 1.0 else []
        self._slots = {token_id: slot for slot, token_id in enumerate(from_prompt)}
        capacity = max(64, 2 * len(from_prompt))
        self._ids = np.zeros(capacity, dtype=np.int64)  # [capacity], the first len(self._slots) in use, all distinct
        self._ids[: len(from_prompt)] = from_prompt
        self._output_counts = np.zeros(capacity, dtype=np.float64)  # [capacity]
        for token_id in output_token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count one output token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._output_counts = np.concatenate([self._output_counts, np.zeros_like(self._output_counts)])
        self._ids[slot] = token_id
        self._output_counts[slot] += 1

    def apply(self, scores: npt.NDArray[np.float32]) -> None:
        """Penalise the seen tokens in place: computed in float64, rounded once, kept finite."""
        used = len(self._slots)
        ids, counts = self._ids[:used], self._output_counts[:used]
        seen = scores[ids].astype(np.float64)
        with np.errstate(over="ignore"):
            seen = np.where(seen > 0, seen / self._repetition, seen * self._repetition)
        seen -= self._presence * (counts > 0) + self._frequency * counts
        scores[ids] = np.clip(seen, -FLOAT32_MAX, FLOAT32_MAX)
