"""Numbers of fewer than eight bits side by side in bytes, the first lowest."""

from __future__ import annotations

import torch


def join_bits(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n], numbers of this many bits, to their bytes; of eight bits, `fields` itself."""
    if bits == 8:
        return fields
    parts = fields.unflatten(-1, (-1, 8 // bits))
    found = parts[..., 0].clone()
    for index in range(1, 8 // bits):
        found |= parts[..., index] << index * bits
    return found


def part_bits(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The way back."""
    if bits == 8:
        return data
    fields = [data >> index * bits & (1 << bits) - 1 for index in range(8 // bits)]
    return torch.stack(fields, dim=-1).flatten(-2)
