"""Numbers and scales of one tensor, as its file has them, spread out on the device: GGUF's blocks, and folders that
have scales apart. Nothing is rounded. What they are put into is `stored_numbers.py`'s to know."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from twostroke.backends.cuda.kernels.packed_format import LOW_BIT_DEPTH, TABLES, Table
from twostroke.models.weights.stored_forms import ScaledTensor
from twostroke.models.weights.tensor import WeightKind, WeightTensor

BLOCK_OF_256 = 256
SMALL_FLOATS = (WeightKind.MXFP4_PARTS, WeightKind.NVFP4_PARTS)
FOUR_BIT_KINDS = (WeightKind.INT4, *SMALL_FLOATS)


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Of one tensor: what its file has, spread out. A weight is (number - zero) * scale, or number * scale + added; in
    two levels scale is `tops[0]` times a byte, and what is taken away `tops[1]` times another."""

    numbers: torch.Tensor  # uint8 [rows, width]
    middle: int  # the number that stands for nothing, where neither `zeros` nor `added` says another
    group: int
    scales: torch.Tensor  # [rows, groups] float32; in two levels int8
    zeros: torch.Tensor | None = None  # float32 [rows, groups]
    added: torch.Tensor | None = None  # float32 [rows, groups]; in two levels int8
    tops: torch.Tensor | None = None  # float16 [rows, blocks of 256, 1 or 2]
    table: Table | None = None  # that numbers of four bits are places in

    def by_groups_of(self, group: int) -> Numbers:
        """Of fewer inputs: each has its own copy of what it shared."""
        each = self.group // group

        def spread(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.repeat_interleave(each, 1)

        scales = self.scales.repeat_interleave(each, 1)
        return replace(self, group=group, scales=scales, zeros=spread(self.zeros), added=spread(self.added))

    def looked_up(self) -> Numbers:
        """As whole numbers of eight bits."""
        if self.table is None:
            return self
        entries = torch.tensor(TABLES[self.table].entries, dtype=torch.uint8, device=self.numbers.device)
        return replace(self, numbers=entries[self.numbers.long()], table=None)

    def in_one_level(self) -> Numbers:
        if self.tops is None:
            return self
        tops = self.tops.float().repeat_interleave(BLOCK_OF_256 // self.group, 1)
        added = None if self.added is None else -tops[..., 1] * self.added.float()
        return replace(self, scales=tops[..., 0] * self.scales.float(), added=added, tops=None)


def numbers_of(tensor: WeightTensor, device: torch.device) -> Numbers:
    if isinstance(tensor, ScaledTensor):
        return _scaled(tensor, device)
    blocks = on_device(tensor.data, device).view(-1, tensor.kind.block_bytes)
    return _READERS[tensor.kind](blocks, tensor.shape[0])


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of a host's array. By its address: torch warns of arrays that cannot be written to, and a filter is not
    this thread's own."""
    held = np.ascontiguousarray(array)
    memory = (ctypes.c_char * held.nbytes).from_address(held.ctypes.data)
    kind = torch.from_numpy(np.empty(0, dtype=held.dtype)).dtype
    seen = torch.frombuffer(memory, dtype=kind).view(held.shape)
    return torch.empty(held.shape, dtype=kind, device=device).copy_(seen)


def _scaled(tensor: ScaledTensor, device: torch.device) -> Numbers:
    """Of a folder that has scales apart."""
    parts = tensor.parts()
    rows, width = parts.shape
    codes = on_device(parts.codes, device)
    if parts.kind in FOUR_BIT_KINDS:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).view(rows, -1)[:, :width]
    by_row = np.repeat(parts.scale_values(), parts.rows_per_scale, axis=0)[:rows]
    scales = on_device(by_row.astype(np.float32), device)
    if parts.kind in SMALL_FLOATS:
        return Numbers(codes, TABLES["e2m1"].middle, parts.group_size, scales / 2, table="e2m1")
    zeros = None if parts.zeros is None else on_device(parts.zeros, device).float()
    middle = {WeightKind.INT4: 8, WeightKind.INT8: 128}.get(parts.kind, 0)
    group = parts.group_size
    if scales.shape[1] == 1 and group >= width:  # one for all inputs: of any whole number of groups
        group = -(-width // LOW_BIT_DEPTH) * LOW_BIT_DEPTH
    return Numbers(codes, middle, group, scales, zeros=zeros)


# GGUF's blocks [n, bytes of a block], of some rows.


def _halves(blocks: torch.Tensor, start: int, count: int, rows: int) -> torch.Tensor:
    """float16 [rows, blocks of a row, count]"""
    return blocks[:, start : start + 2 * count].contiguous().view(torch.float16).view(rows, -1, count)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[n, bytes] to [n, 2 * bytes]: all low ones, then all high ones"""
    return torch.cat([packed & 15, packed >> 4], dim=1)


def _of_32(
    numbers: torch.Tensor, scales: torch.Tensor, rows: int, middle: int, added: torch.Tensor | None = None
) -> Numbers:
    return Numbers(
        numbers.reshape(rows, -1), middle, 32, scales.float(), added=None if added is None else added.float()
    )


def _q8_0(blocks: torch.Tensor, rows: int) -> Numbers:
    return _of_32(blocks[:, 2:] ^ 128, _halves(blocks, 0, 1, rows)[..., 0], rows, 128)


def _q4_0(blocks: torch.Tensor, rows: int) -> Numbers:
    return _of_32(nibbles(blocks[:, 2:]), _halves(blocks, 0, 1, rows)[..., 0], rows, 8)


def _q4_1(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, added = _halves(blocks, 0, 2, rows).unbind(2)
    return _of_32(nibbles(blocks[:, 4:]), scales, rows, 8, added)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[n, 4] to [n, 32], the lowest first: 0 or 16"""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[..., None] >> shifts & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor, rows: int) -> Numbers:
    numbers = nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _of_32(numbers, _halves(blocks, 0, 1, rows)[..., 0], rows, 16)


def _q5_1(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, added = _halves(blocks, 0, 2, rows).unbind(2)
    numbers = nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _of_32(numbers, scales, rows, 16, added)


def _bytes_of_k(packed: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Twelve bytes a block to eight scales and eight minimums of six bits: the first four of each have a byte, in whose
    upper two bits lie those of the last four, of which a byte each has the lower bits of both."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, (last & 15) | (first >> 6) << 4], dim=1)
    minimums = torch.cat([second & 63, last >> 4 | (second >> 6) << 4], dim=1)
    return scales.view(torch.int8).view(rows, -1), minimums.view(torch.int8).view(rows, -1)


def _nibbles_of_k(packed: torch.Tensor) -> torch.Tensor:
    """[n, 128] to [n, 256]: 32 bytes hold 32 numbers below and the next 32 above."""
    runs = packed.reshape(len(packed), 4, 1, 32)
    return torch.cat([runs & 15, runs >> 4], dim=2).flatten(1)


def _q4_k(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, minimums = _bytes_of_k(blocks[:, 4:16], rows)
    numbers = _nibbles_of_k(blocks[:, 16:]).view(rows, -1)
    return Numbers(numbers, 8, 32, scales, added=minimums, tops=_halves(blocks, 0, 2, rows))


def _q5_k(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, minimums = _bytes_of_k(blocks[:, 4:16], rows)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1).flatten(1) << 4
    numbers = (_nibbles_of_k(blocks[:, 48:]) | fifth).view(rows, -1)
    return Numbers(numbers, 16, 32, scales, added=minimums, tops=_halves(blocks, 0, 2, rows))


def _q6_k(blocks: torch.Tensor, rows: int) -> Numbers:
    """Of each half of a block 64 bytes hold the lower four bits of 64 numbers and, above, of 64 more; 32 bytes the
    other two bits of four times 32."""
    lows = blocks[:, :128].reshape(-1, 2, 1, 64)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    highs = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    numbers = torch.cat([lows & 15, lows >> 4], dim=2).flatten(2) | highs.flatten(2) << 4
    scales = blocks[:, 192:208].contiguous().view(torch.int8).view(rows, -1)
    return Numbers(numbers.reshape(rows, -1), 32, 16, scales, tops=_halves(blocks, 208, 1, rows))


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """[n, 64] to [n, 256]: 32 bytes hold four runs of 32 numbers, the first in the lowest two bits."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)[:, None]
    return (packed.reshape(-1, 2, 1, 32) >> shifts & 3).flatten(1)


def _q2_k(blocks: torch.Tensor, rows: int) -> Numbers:
    scales, minimums = (part.view(torch.int8).view(rows, -1) for part in (blocks[:, :16] & 15, blocks[:, :16] >> 4))
    numbers = _pairs(blocks[:, 16:80]).view(rows, -1)
    return Numbers(numbers, 2, 16, scales, added=minimums, tops=_halves(blocks, 80, 2, rows))


def _q3_k(blocks: torch.Tensor, rows: int) -> Numbers:
    """Of scales eight bytes hold the lower four bits, those of the first eight below, and four bytes the two above."""
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)[:, None]
    third = (blocks[:, None, :32] >> shifts & 1).flatten(1) << 2  # bit i of byte b: of number 32 * i + b
    numbers = (_pairs(blocks[:, 32:96]) | third).view(rows, -1)
    low = nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> 2 * shifts[:4] & 3).flatten(1)
    scales = (low | high << 4).view(torch.int8) - 32
    return Numbers(numbers, 4, 16, scales.view(rows, -1), tops=_halves(blocks, 108, 1, rows))


def _iq4_nl(blocks: torch.Tensor, rows: int) -> Numbers:
    return replace(_q4_0(blocks, rows), middle=TABLES["iq4_nl"].middle, table="iq4_nl")


def _iq4_xs(blocks: torch.Tensor, rows: int) -> Numbers:
    """Of eight scales four bytes hold the lower four bits, two in a byte, and two bytes the two bits above."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    low = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1).flatten(1)
    scales = ((low | high << 4).view(torch.int8) - 32).view(rows, -1)
    numbers = nibbles(blocks[:, 8:].reshape(-1, 16)).view(rows, -1)
    middle = TABLES["iq4_nl"].middle
    return Numbers(numbers, middle, 32, scales, tops=_halves(blocks, 0, 1, rows), table="iq4_nl")


def _mxfp4(blocks: torch.Tensor, rows: int) -> Numbers:
    """Of floats of four bits: their scales are half as large as what they stand for is doubled."""
    scales = torch.exp2(blocks[:, :1].double() - 128).float()
    scales[blocks[:, :1] == 255] = torch.nan
    numbers, middle = nibbles(blocks[:, 1:]).view(rows, -1), TABLES["e2m1"].middle
    return Numbers(numbers, middle, 32, scales.view(rows, -1), table="e2m1")


_READERS: dict[WeightKind, Callable[[torch.Tensor, int], Numbers]] = {
    WeightKind.Q8_0: _q8_0,
    WeightKind.Q4_0: _q4_0,
    WeightKind.Q4_1: _q4_1,
    WeightKind.Q5_0: _q5_0,
    WeightKind.Q5_1: _q5_1,
    WeightKind.Q4_K: _q4_k,
    WeightKind.Q5_K: _q5_k,
    WeightKind.Q6_K: _q6_k,
    WeightKind.Q2_K: _q2_k,
    WeightKind.Q3_K: _q3_k,
    WeightKind.IQ4_NL: _iq4_nl,
    WeightKind.IQ4_XS: _iq4_xs,
    WeightKind.MXFP4: _mxfp4,
}
