"""Floats brought to whole numbers of a block of inputs, as GGUF's Q8_0 and Q4_1 have them: to the same numbers and
scales that `models/weights/quantisation.py` finds. Plain torch, on the device where the weights lie."""

from __future__ import annotations

from typing import Final

import torch

SLICE_VALUES: Final = 1 << 24
"""What is brought at a time: some dozen times as many bytes are needed meanwhile."""

Blocks = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def rounded_in_blocks(weight: torch.Tensor, group: int, bits: int, *, has_minimum: bool) -> Blocks:
    """From [rows, width]: numbers, uint8 [rows, width]; float16 scales [rows, groups]; and minimums, where a weight is
    its number times the scale plus that. Else it is its number, less the middle one, times the scale."""
    parts = weight.split(max(1, SLICE_VALUES // weight.shape[1]))
    found = [_with_minimum(part, group, bits) if has_minimum else _about_middle(part, group, bits) for part in parts]
    numbers, scales, minimums = zip(*found, strict=True)
    return torch.cat(numbers), torch.cat(scales), torch.cat(minimums) if has_minimum else None


def _about_middle(weight: torch.Tensor, group: int, bits: int) -> Blocks:
    """Halves are rounded away from zero. Adding 0.5 first would itself round, just below a half."""
    most = (1 << (bits - 1)) - 1
    blocks = _blocks(weight, group)
    scales = blocks.abs().amax(-1) / most
    scaled = blocks * _inverse(scales)[..., None]
    whole = scaled.trunc()
    numbers = whole + (2 * (scaled - whole)).trunc() + (most + 1)
    return _flat(numbers, weight), scales.to(torch.float16), None


def _with_minimum(weight: torch.Tensor, group: int, bits: int) -> Blocks:
    most = (1 << bits) - 1
    blocks = _blocks(weight, group)
    least, largest = blocks.aminmax(dim=-1)
    scales = (largest - least) / most
    scaled = (blocks - least[..., None]) * _inverse(scales)[..., None]
    numbers = (scaled + 0.5).trunc().clamp(0, most)
    return _flat(numbers, weight), scales.to(torch.float16), least.to(torch.float16)


def _blocks(weight: torch.Tensor, group: int) -> torch.Tensor:
    """float32 [rows, groups, group]; behind the last input stand copies of it, which change no scale."""
    missing = -weight.shape[1] % group
    whole = torch.cat([weight, weight[:, -1:].expand(-1, missing)], dim=1) if missing else weight
    return whole.float().view(len(weight), -1, group)


def _flat(numbers: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]]


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where that is not finite: such a scale is 0 in float16 too."""
    inverse = 1 / scales
    return torch.where(inverse.isfinite(), inverse, 0.0)
