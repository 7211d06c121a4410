"""Packing and unpacking in plain torch, as the format says: what the kernel that packs is held against, and what
products with packed weights must give."""

from __future__ import annotations

from typing import Final

import torch

from twostroke.backends.cuda.kernels.packed_format import DEPTH, ROUND_BYTES, UNIT_ROWS
from twostroke.backends.cuda.kernels.packing import EXPONENT_CODES, LEAST_EXPONENT, PackedMatrix, is_packable

_BIAS: Final = 127
_SLICE_WEIGHTS: Final = 1 << 24
"""What is packed at a time: some 40 times as many bytes are needed meanwhile."""


def pack(weight: torch.Tensor, place: PackedMatrix) -> None:
    """Fill `place` from `weight` [..., rows, depth]; gated: gate, then up. Where a weight is not finite, its row's
    factor is infinite, and what was packed of the row is of no use."""
    *_, rows, depth = weight.shape
    assert is_packable(weight, is_gated=place.is_gated)
    matrices = weight.view(-1, rows, depth)
    data, factors = place.data.view(-1, *place.data.shape[-3:]), place.factors.view(-1, place.factors.shape[-1])
    units_at_once = max(1, _SLICE_WEIGHTS // (depth * UNIT_ROWS))
    matrices_at_once = max(1, units_at_once // data.shape[1])
    for first in range(0, len(matrices), matrices_at_once):
        end = min(first + matrices_at_once, len(matrices))
        for unit in range(0, data.shape[1], units_at_once):
            last = min(unit + units_at_once, data.shape[1])
            part = _rows(matrices[first:end], unit * UNIT_ROWS, last * UNIT_ROWS, place.is_gated)
            largest = _largest_exponents(part)
            powers = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - _BIAS)
            factors[first:end, unit * UNIT_ROWS : last * UNIT_ROWS] = powers.view(end - first, -1)
            data[first:end, unit:last] = _arranged(_codes(part, largest)).view(
                end - first, last - unit, -1, ROUND_BYTES
            )


def _rows(matrices: torch.Tensor, first: int, end: int, is_gated: bool) -> torch.Tensor:
    """[matrices * (end - first), depth]: so many rows of each matrix as they are packed, zeros behind its last."""
    count, rows, depth = matrices.shape
    if is_gated:
        turns = matrices.view(count, 2, rows // 16, 8, depth)[:, :, first // 16 : end // 16]
        part = turns.transpose(1, 2).reshape(count, -1, depth)
    else:
        part = matrices[:, first:end]
    if part.shape[1] < end - first:
        part = torch.nn.functional.pad(part, (0, 0, 0, end - first - part.shape[1]))
    return part.reshape(-1, depth)


def _bits(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(torch.int16).to(torch.int32)


def _largest_exponents(part: torch.Tensor) -> torch.Tensor:
    """int32 [rows]"""
    return (_bits(part) >> 7 & 0xFF).amax(1).clamp_(min=LEAST_EXPONENT)


def _codes(part: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Of every weight, int32: sign (bit 11), exponent code (4 bits), mantissa (7 bits)."""
    bits = _bits(part)
    lowest = (largest - EXPONENT_CODES)[:, None]
    exact = (bits & 0x7FFF) - (lowest << 7)
    rounded = torch.ldexp(part.float().abs(), (_BIAS + 6) - lowest).clamp_(max=255).round_().to(torch.int32)
    return torch.where(exact >= 1 << 7, exact, rounded) | (bits >> 4 & 0x800)


def _shifts(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a weight's sign (bit 3 of its code's upper half) and its exponent's upper bits (bits 0 to 2) go in a word
    of eight: by input's half, row's half, input. Each of the first four has bits 7 and 0 to 2 of its byte; the others'
    are there once the word is turned left by four."""
    signs = torch.tensor([[[4, 12], [20, 28]], [[0, 8], [16, 24]]], device=device)
    exponents = torch.tensor([[[0, 8], [16, 24]], [[28, 4], [12, 20]]], device=device)
    return signs, exponents


def _arranged(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [units, depth // DEPTH, ROUND_BYTES]. A warp has 16 rows, and of each 16 inputs a thread has eight weights:
    of two rows eight apart, two neighbours and the two eight inputs further. For each round a thread finds the lower
    bytes of 16 codes, 512 bytes further 16 more, and behind those 16 bytes with the upper halves of bytes."""
    units, blocks = len(codes) // UNIT_ROWS, codes.shape[1] // DEPTH
    # unit, warp, row's half, row, block, 32 inputs, 16 inputs, input's half, pair, input
    by_place = codes.view(units, 4, 2, 8, blocks, 2, 2, 2, 4, 2)
    lower = (by_place & 0xFF).to(torch.uint8).permute(0, 4, 1, 5, 3, 8, 6, 7, 2, 9).reshape(units, blocks, 4, 1024)
    upper = (by_place >> 8).permute(0, 4, 1, 3, 8, 5, 6, 7, 2, 9).to(torch.int64)
    signs, exponents = _shifts(codes.device)
    words = ((upper & 8) << signs | (upper & 7) << exponents).sum((-3, -2, -1))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return torch.cat([lower, words.reshape(units, blocks, 4, 128).view(torch.uint8)], dim=-1).flatten(2)


def unpacked(packed: PackedMatrix, rows: int) -> torch.Tensor:
    """The bfloat16 weights of one matrix that a product sees: gate, then up, where it is gated."""
    units, blocks = packed.data.shape[:2]
    by_warp = packed.data.view(units, blocks, 4, ROUND_BYTES // 4)
    lower = by_warp[..., :1024].reshape(units, blocks, 4, 2, 8, 4, 2, 2, 2, 2).to(torch.int32)
    words = by_warp[..., 1024:].contiguous().view(torch.int32).view(units, blocks, 4, 8, 4, 2, 2, 1, 1, 1)
    signs, exponents = _shifts(words.device)
    upper = (words >> signs & 8 | words >> exponents & 7).permute(0, 2, 8, 3, 1, 5, 6, 7, 4, 9)
    codes = upper << 8 | lower.permute(0, 2, 8, 4, 1, 3, 6, 7, 5, 9)
    exponent, mantissa = codes >> 7 & 0xF, (codes & 0x7F).float()
    size = torch.ldexp(mantissa + 128 * (exponent > 0), exponent.clamp(min=1) - EXPONENT_CODES - 7)
    signed = torch.where(codes >= 1 << 11, -size, size).reshape(units * UNIT_ROWS, -1)
    found = (signed * packed.factors[:, None]).to(torch.bfloat16)
    if packed.is_gated:
        found = found[:rows].view(rows // 16, 2, 8, -1).transpose(0, 1).reshape(rows, -1)
    return found[:rows]
