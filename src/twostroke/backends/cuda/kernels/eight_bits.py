"""Weights as float8 (e4m3) with a scale for each output, by rows, and rows of a prompt brought to the same for Hopper's
float8 products. Inputs lie in an order of their own, the same on both sides, so that a thread of the few-row product
finds sixteen bytes of a row together (codes.cuh). Knows the bytes; who multiplies is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.packed_format import FP8, LOW_BIT_DEPTH, UNIT_ROWS, Code, units_of
from twostroke.backends.cuda.kernels.target import dependent
from twostroke.backends.cuda.kernels.turns import start_next_and_wait
from twostroke.backends.cuda.kernels.unit_order import to_units
from twostroke.backends.cuda.kernels.whole_numbers import next_power_of_2

LARGEST: Final = 448.0
"""That float8 has."""
LEAST_SCALE: Final = 2.0**-100
"""Of a row of zeros."""
E4M3: Final = torch.float8_e4m3fn
SLICE_VALUES: Final = 1 << 24
"""What is quantised at a time: some dozen times as many bytes are needed meanwhile."""


@dataclass(frozen=True, slots=True, eq=False)
class EightBitMatrix:
    data: torch.Tensor  # uint8, bits of e4m3 [rows, padded width], inputs in `stored_order`
    scales: torch.Tensor  # float32 [rows]
    factors: torch.Tensor  # float32 [units * UNIT_ROWS]: the same, as few-row products read them
    width: int
    is_gated: bool  # rows are those of a gate, then as many of an up matrix

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device | str, *, is_gated: bool = False) -> EightBitMatrix:
        rows, width = shape
        padded = FP8.rounds(width) * LOW_BIT_DEPTH
        return EightBitMatrix(
            torch.zeros(rows, padded, dtype=torch.uint8, device=device),
            torch.zeros(rows, dtype=torch.float32, device=device),
            torch.zeros(units_of(rows) * UNIT_ROWS, dtype=torch.float32, device=device),
            width,
            is_gated,
        )

    @property
    def code(self) -> Code:
        return FP8

    @property
    def units(self) -> int:
        return len(self.factors) // UNIT_ROWS

    @property
    def rounds(self) -> int:
        return self.data.shape[1] // LOW_BIT_DEPTH

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + self.factors.nbytes

    def quantise(self, weight: torch.Tensor) -> None:
        """From floats [rows, width], to the nearest."""
        scales = torch.clamp(weight.abs().amax(1).float() / LARGEST, min=LEAST_SCALE)
        step = max(1, SLICE_VALUES // self.width)
        for start in range(0, len(weight), step):
            part = slice(start, start + step)
            self._put_rows(part, (weight[part].float() / scales[part, None]).to(E4M3).view(torch.uint8))
        self._put_scales(scales)

    def put(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """codes: uint8, bits of e4m3 [rows, width]; scales: float32 [rows]"""
        self._put_rows(slice(None), codes)
        self._put_scales(scales)

    def _put_rows(self, rows: slice, codes: torch.Tensor) -> None:
        padded = torch.nn.functional.pad(codes, (0, self.data.shape[1] - self.width))
        self.data[rows] = padded[:, stored_order(self.data.shape[1], codes.device)]

    def _put_scales(self, scales: torch.Tensor) -> None:
        self.scales.copy_(scales)
        self.factors.copy_(to_units(scales[:, None], is_gated=self.is_gated)[:, 0])

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, width]"""
        order = torch.argsort(stored_order(self.data.shape[1], self.data.device))
        codes = self.data[:, order][:, : self.width].contiguous()
        return (codes.view(E4M3).float() * self.scales[:, None]).to(dtype)


@cache
def stored_order(width: int, device: torch.device) -> torch.Tensor:
    """Of each byte of a row, whose input it is. Of each 128 inputs a thread of four has twice sixteen bytes: of four
    steps of 16 inputs each, two neighbours and the two eight inputs on."""
    byte = torch.arange(width, device=device)
    thread, half, step, place = byte >> 5 & 3, byte >> 4 & 1, byte >> 2 & 3, byte & 3
    return (byte & ~127) + half * 64 + step * 16 + thread * 2 + (place >> 1) + (1 - (place & 1)) * 8


def quantise_rows(
    x: torch.Tensor,  # [num_rows, width], rows contiguous
    out: torch.Tensor,  # uint8 [num_rows, padded width], contiguous: bits of e4m3, in stored order
    scales: torch.Tensor,  # float32 [num_rows]
) -> None:
    """A scale for each row, of its largest."""
    num_rows, width = x.shape
    padded = out.shape[1]
    block = next_power_of_2(padded)
    dependent(_quantise_rows, (num_rows,), x.device)(
        x, out.view(E4M3), scales, x.stride(0), WIDTH=width, PADDED=padded, BLOCK=block, LARGEST=LARGEST,
        LEAST=LEAST_SCALE, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip


@triton.jit
def _quantise_rows(
    x, out, scales, x_stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK)
    place = byte & 3
    inputs = (byte & ~127) + (byte >> 4 & 1) * 64 + (byte >> 2 & 3) * 16 + (byte >> 5 & 3) * 2
    inputs += (place >> 1) + (1 - (place & 1)) * 8
    start_next_and_wait(PDL)
    value = tl.load(x + row * x_stride + inputs, mask=inputs < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / LARGEST, LEAST)
    tl.store(scales + row, scale)
    tl.store(out + row * PADDED + byte, (value / scale).to(out.dtype.element_ty), mask=byte < PADDED)
