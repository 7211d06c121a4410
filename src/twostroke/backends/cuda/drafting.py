"""Drafts on a device: where the tokens lie that a row is to have verified, and what whoever makes them there is told.
Knows neither how drafts are made nor how they are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from twostroke.backends.cuda.passes import Pass

if TYPE_CHECKING:
    from twostroke.backends.cuda.draft_blocks import DeviceBlocks
    from twostroke.backends.cuda.mixers import Kernels

MAX_DRAFTS: Final = 7
"""That a slot may carry."""
NO_DRAFT: Final = -1
"""In a row's line of drafts: there is none from here on."""
NOT_FINITE: Final = -1
"""In place of a token: logits were not finite, and nothing came from here on."""
NOTHING: Final = -2
"""In place of a token: the draft before it did not hold."""


class DeviceDrafter(Protocol):
    """Makes drafts on the device, where the tokens are that the host does not know yet. What is called in graphs
    allocates nothing, waits for nothing and reads nothing back."""

    name: str
    source: str
    """Where it comes from."""
    most: int
    """Drafts that it makes of a stream."""
    max_context: int
    """It drafts for no stream that is longer."""

    @property
    def kernels(self) -> Kernels:
        """By which it reads prompts along, if it is a model of its own: their tiles are sent with each step."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model behind which it reads the residual stream of every token; -1: what enters the first."""

    @property
    def blocks(self) -> DeviceBlocks | None:
        """What it keeps behind block ids of its groups; None: nothing."""

    def load(self) -> tuple[str, ...]:
        """Fill its weights. Returns the matrices whose copies for decode had to be dropped."""

    def prepare(self, *, rehearses: bool) -> None:
        """Have kernels compiled that no captured step is sure to meet, and drafts timed; a rehearsal only the first."""

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        """Called in every pass, before anything is sampled: with its tokens, whose positions are known by now, and
        what was tapped of them, side by side  # [num_tokens, taps * hidden]"""

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """Called at the beginning of a step that verifies drafts: make `width` - 1 behind the last token of each
        stream. rows int32 [streams * width]: a stream's row for its own token and for each draft that it is to have,
        then the padding row; drafts int32 [max rows + 1, MAX_DRAFTS], written at the row."""

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        """What that takes, for this many streams and drafts of each; 0: nobody knows."""
