"""Experts' matrices in MXFP4, as files have them: numbers of four bits (e2m1), two a byte, the first below, and a power
of two (E8M0) for each 32 inputs of an output. Kernels for experts bring them to floats in registers; every value is
one of bfloat16, so nothing is rounded. Knows how they lie and how they are read; who multiplies, others know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from twostroke.backends.cuda.kernels.packed_format import MXFP4, Code

GROUP = 32
"""Inputs that share a power of two; kernels have the number itself."""
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class MxMatrix:
    data: torch.Tensor  # uint8 [experts, rows, width / 2]
    scales: torch.Tensor  # uint8 [experts, rows, width / 32]

    @property
    def code(self) -> Code:
        return MXFP4

    @staticmethod
    def empty(shape: tuple[int, ...], device: torch.device) -> MxMatrix:
        """shape: [experts, rows, width]"""
        *outer, width = shape
        return MxMatrix(
            torch.zeros((*outer, width // 2), dtype=torch.uint8, device=device),
            torch.zeros((*outer, width // GROUP), dtype=torch.uint8, device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    def dequantised(self) -> torch.Tensor:
        """float32 [experts, rows, width]"""
        levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], device=self.data.device)
        numbers = torch.stack([self.data & 15, self.data >> 4], dim=-1).flatten(-2).long()
        powers = torch.exp2(self.scales.double() - 127).repeat_interleave(GROUP, -1)
        return (levels[numbers] * powers).float()


def parts_of(weights: torch.Tensor | MxMatrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numbers, and scales if they have any."""
    return (weights.data, weights.scales) if isinstance(weights, MxMatrix) else (weights, None)


@triton.jit
def small_floats(codes):
    """int32 numbers of four bits -> float32"""
    magnitude = codes & 7
    exponent = magnitude >> 1
    bits = tl.where(exponent > 0, ((exponent + 126) << 23) | ((magnitude & 1) << 22), (magnitude & 1) * (126 << 23))
    return (bits | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def powers_of_two(codes):
    """int32 exponents, less 127 -> float32; the least is below what its exponent alone can say."""
    return tl.where(codes > 0, codes << 23, 1 << 22).to(tl.float32, bitcast=True)


@triton.jit
def mx_block(
    rows, scale_rows, start, num_inputs: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Weights of DEPTH inputs from `start` on, float32 [OUTPUTS, DEPTH]; what is beyond the last is zero. rows,
    scale_rows: pointers to the first number and the first scale of each output."""
    half = tl.arange(0, DEPTH // 2)[None, :]
    group = tl.arange(0, DEPTH // 32)[None, :]
    if num_inputs % DEPTH == 0:
        packed = tl.load(rows[:, None] + start // 2 + half).to(tl.int32)
        scales = tl.load(scale_rows[:, None] + start // 32 + group).to(tl.int32)
    else:
        is_input = start // 2 + half < num_inputs // 2
        packed = tl.load(rows[:, None] + start // 2 + half, mask=is_input, other=0).to(tl.int32)
        is_group = start // 32 + group < num_inputs // 32
        scales = tl.load(scale_rows[:, None] + start // 32 + group, mask=is_group, other=0).to(tl.int32)
    values = tl.join(small_floats(packed & 15), small_floats(packed >> 4))
    by_group = tl.reshape(values, [OUTPUTS, DEPTH // 32, 32]) * powers_of_two(scales)[:, :, None]
    return tl.reshape(by_group, [OUTPUTS, DEPTH])


@triton.jit
def mx_sums(
    rows, scale_rows, inputs, start, num_inputs: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Products of one row of inputs with DEPTH inputs' weights from `start` on, summed by their scales: float32
    [OUTPUTS, DEPTH / 32]. inputs: a pointer to the first of all."""
    half = tl.arange(0, DEPTH // 2)
    group = tl.arange(0, DEPTH // 32)
    depth = start + tl.arange(0, DEPTH)
    is_pair = (start // 2 + half < num_inputs // 2)[None, :]
    is_group = (start // 32 + group < num_inputs // 32)[None, :]
    packed = tl.load(rows[:, None] + start // 2 + half[None, :], mask=is_pair, other=0).to(tl.int32)
    scales = tl.load(scale_rows[:, None] + start // 32 + group[None, :], mask=is_group, other=0).to(tl.int32)
    values = tl.load(inputs + depth, mask=depth < num_inputs, other=0.0).to(tl.float32)
    weights = tl.join(small_floats(packed & 15), small_floats(packed >> 4))  # [OUTPUTS, DEPTH / 2, 2]
    products = weights * tl.reshape(values, [DEPTH // 2, 2])[None, :, :]
    by_group = tl.sum(tl.reshape(products, [OUTPUTS, DEPTH // 32, 32]), 2)
    return by_group * powers_of_two(scales)
