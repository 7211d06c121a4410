"""Drafts on a device: the numbers that say where a row has drafts to verify, and the interface of drafters there. Knows
neither how drafts are made nor how they are verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from twostroke.backends.cuda.passes import Pass

if TYPE_CHECKING:
    from twostroke.backends.cuda.draft_blocks import DeviceBlocks
    from twostroke.backends.cuda.mixers import Kernels

MAX_DRAFTS: Final = 7
"""The most drafts that a slot may carry."""
NO_DRAFT: Final = -1
"""Stands in a row's line of drafts, and means that there is no draft from here on."""
NOT_FINITE: Final = -1
"""Stands in place of a token, and means that logits were not finite: no token came from here on."""
NOTHING: Final = -2
"""Stands in place of a token, and means that the draft before it did not hold."""


class DeviceDrafter(Protocol):
    """Makes drafts on the device, where the tokens are that the host does not know yet. Methods that are called in
    graphs allocate nothing, wait for nothing and read nothing back."""

    name: str
    source: str
    """The file or folder that it comes from."""
    most: int
    """The most drafts that it makes for a stream."""
    max_context: int
    """It drafts for no stream that is longer than this."""

    @property
    def kernels(self) -> Kernels:
        """The kernels by which it reads prompts along, if it is a model of its own. Their tiles are sent with each
        step."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the model. Behind each it reads the residual stream of every token; -1 means what enters the first
        layer."""

    @property
    def blocks(self) -> DeviceBlocks | None:
        """What it keeps in blocks of its groups. None means that it keeps nothing."""

    def load(self) -> tuple[str, ...]:
        """Fills its weights. Returns the matrices whose copies for decode had to be dropped."""

    def prepare(self, *, rehearses: bool) -> None:
        """Compiles kernels that captured steps may not meet, and measures the time of drafts. A rehearsal only
        compiles."""

    def follow(self, done: Pass, taps: torch.Tensor) -> None:
        """Called in every pass, before anything is sampled, with the pass, whose tokens' positions are known by now,
        and with what was tapped of these tokens, side by side  # [num_tokens, taps * hidden]"""

    def draft(self, rows: torch.Tensor, width: int, drafts: torch.Tensor) -> None:
        """Called at the beginning of a step that verifies drafts. Makes `width` - 1 drafts behind the last token of
        each stream. rows int32 [streams * width] has a stream's row for its own token and for each draft that it is to
        have, then the padding row. drafts int32 [max rows + 1, MAX_DRAFTS] is written at the row."""

    def seconds(self, num_streams: int, num_drafts: int) -> float:
        """Returns the predicted seconds of that for that many streams and drafts of each. 0 means that nobody knows."""
