"""What one pass of a decoder computes: its tokens, where their numbers lie on the device, and which of them decode.
Knows no layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.prefill_tiles import PrefillWork


@dataclass(frozen=True, slots=True, eq=False)
class TokenArrays:
    """What every layer needs to know of the step's tokens: int32 on the device, [num_tokens] each."""

    token_ids: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor  # FROM_ROW, as are token ids, where a row alone knows

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True, eq=False)
class Decodes:
    """The tokens of a step, the first, that are attended as decodes."""

    slots: int  # the most there may be: what a graph has room for
    count: torch.Tensor | None = None  # int32 [1] on the device: how many there are; None: as many as slots
    width: int = 1  # tokens of a sequence, side by side: its last, and drafts behind it


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What a pass computes. Whoever follows a pass is told of it with all positions found."""

    tokens: TokenArrays
    decodes: Decodes
    prefill: PrefillWork | None = None


Follow = Callable[[Pass, torch.Tensor], None]
"""Told of a pass, and of what was tapped of its tokens  # [num_tokens, taps * hidden]"""
