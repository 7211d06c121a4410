"""What a forward pass gives, and who makes one: a model that answers, or one that drafts for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.batch import Batch
from twostroke.backends.host.kept_blocks import BlockStore
from twostroke.models.spec import ModelSpec

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Scores:
    """Valid until the next pass of the same model."""

    logits: Floats  # [num_logits, vocab]
    highest: list[int | None]
    """The token of each row's highest logit, the first of equal ones; None: the row's logits are not all finite."""
    taps: tuple[Floats, ...] = ()  # [num_tokens, hidden] each
    """The residual stream of every row after each layer that somebody asked for (`all_taps`), in that order."""
    last_hidden: Floats | None = None  # [num_logits, hidden]
    """The same after the last layer, before the final norm, of the rows whose logits were wanted."""

    @staticmethod
    def of(logits: Floats) -> Scores:
        finite: list[bool] = np.all(np.isfinite(logits), axis=1).tolist()
        best = logits.argmax(axis=1).tolist()
        return Scores(logits, [token if is_finite else None for token, is_finite in zip(best, finite, strict=True)])


class HostModel(Protocol):
    """A model in host memory with KV of its own."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def kv(self) -> BlockStore: ...

    def score(self, batch: Batch) -> Scores:
        """Compute every token of a batch and write its KV. The batch's tables are those of this model's groups."""
