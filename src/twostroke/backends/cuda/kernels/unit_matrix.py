"""A matrix of few bits in units of rows: where its bytes are, and what a launch asks of any such matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.backends.cuda.kernels.packed_format import Code


@dataclass(frozen=True, slots=True, eq=False)
class UnitMatrix:
    data: torch.Tensor  # uint8 [units, rounds, code.unit_bytes]
    code: Code
    rows: int
    width: int
    is_gated: bool  # rows are those of a gate and of an up matrix, in turns of eight

    @property
    def factors(self) -> None:
        return None

    @property
    def units(self) -> int:
        return self.data.shape[0]

    @property
    def rounds(self) -> int:
        return self.data.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes
