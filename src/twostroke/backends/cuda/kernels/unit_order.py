"""The order of a matrix's rows in units of 64, as few-row products with weights of few bits take them: as they are, or
for a gated product gates and ups in turns of eight."""

from __future__ import annotations

import torch
from torch.nn import functional

from twostroke.backends.cuda.kernels.packed_format import UNIT_ROWS, units_of


def to_units(rows: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """[units * UNIT_ROWS, ...]: what is behind the last row is zeros."""
    if is_gated:
        gate, up = rows.view(2, -1, 8, *rows.shape[1:])
        rows = torch.stack([gate, up], dim=1).flatten(0, 2)
    missing = units_of(len(rows)) * UNIT_ROWS - len(rows)
    return functional.pad(rows, (*(0, 0) * (rows.dim() - 1), 0, missing))


def from_units(units: torch.Tensor, num_rows: int, *, is_gated: bool) -> torch.Tensor:
    """[num_rows, ...]: gate, then up"""
    rows = units[:num_rows]
    if is_gated:
        rows = rows.view(-1, 2, 8, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)
    return rows
