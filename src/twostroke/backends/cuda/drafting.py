"""Drafts on a device: where the tokens lie that a row is to have verified, and what whoever makes them there is told.
Knows neither how drafts are made nor how they are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch

from twostroke.core.step import Step

MAX_DRAFTS: Final = 7
"""That a slot may carry."""
NO_DRAFT: Final = -1
"""In a row's line of drafts: there is none from here on."""
NOT_FINITE: Final = -1
"""In place of a token: logits were not finite, and nothing came from here on."""
NOTHING: Final = -2
"""In place of a token: the draft before it did not hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """A step of decodes, at the end of its graph: rows know their new lengths and last tokens. Its token
    `stream * width + offset` is a stream's last token, or the draft of that number behind it."""

    width: int
    rows: torch.Tensor  # int32 [streams]; the padding row's fill up
    entered: torch.Tensor  # int32 [streams * width]: the row of each token; the padding row's where there was no draft
    positions: torch.Tensor  # int32 [streams * width]: where each stood
    tokens: torch.Tensor  # int32 [streams, width]: what came, then NOTHING or NOT_FINITE
    counts: torch.Tensor  # int32 [streams]: how many came
    drafts: torch.Tensor  # int32 [max rows + 1, MAX_DRAFTS]: for the next step, written by whoever drafts
    taps: tuple[torch.Tensor, ...]  # [streams * width, hidden] each: the residual stream after the layers asked for


@dataclass(frozen=True, slots=True, eq=False)
class PromptRead:
    """A step with chunks of prompts, decodes beside them or not, behind its sampling: rows know the tokens that came.
    What follows a chunk that does not complete its prompt is not known before the next one."""

    step: Step
    token_ids: torch.Tensor  # int32 [tokens]; FROM_ROW for decodes
    rows: torch.Tensor  # int32 [tokens]
    positions: torch.Tensor  # int32 [tokens]; FROM_ROW for decodes
    sampled_rows: list[int]
    """Rows that a token came for: the decodes', then those of chunks that complete a prompt."""
    last_tokens: torch.Tensor  # int32 [max rows + 1]
    drafts: torch.Tensor  # int32 [max rows + 1, MAX_DRAFTS], written by whoever drafts
    taps: tuple[torch.Tensor, ...]  # [tokens, hidden] each


class DeviceDrafter(Protocol):
    """Makes drafts on the device, where the tokens are that the host does not know yet."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model after which it reads the residual stream of every token. Not the last, which goes on with
        some of a prompt's tokens alone."""

    def follow(self, verified: Verified) -> None:
        """Called in the graph of every step of decodes alone: nothing is allocated, waited for or read back."""

    def read(self, prompt: PromptRead) -> None:
        """Called behind every step with chunks, outside of graphs."""
