"""The input of a projection in memory: rows of floats, and the same rows in 8 bits, a scale for each 32 values
and a second digit for the largest of them."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from twostroke.backends.cpu.arguments import (
    MOST_LACKING_ROWS,
    ORIGIN,
    ROWS_APART_BYTES,
    GatedField,
    OperandField,
    quantised_stride,
)
from twostroke.backends.cpu.memory import LINE_BYTES, Bytes, Floats, Scalar, address_of, padded, zeros

GROUP_VALUES = 32


class Operand:
    """One for all threads, or a copy for each; the arrays here are the first copy's. Where rows stay with their
    threads, those of the first lie at their places, and every other thread's further on: there is room for that."""

    floats: Floats  # [rows, width]
    quantised: npt.NDArray[np.int8]  # [rows, width]
    origins: Floats  # [rows, width / 32] the scale times ORIGIN
    sums: npt.NDArray[np.uint16]  # [rows, width / 32, to an even number] bf16: the scale times the sum of the group
    starts: npt.NDArray[np.int32]  # [rows, width / 32] the origin's bits, less START_MIDDLE times the sum of the group
    byte_starts: npt.NDArray[np.int32]  # [rows, width / 32] the same with BYTE_MIDDLE
    peaks: npt.NDArray[np.int32]  # [rows, width / 32] where in the group its largest value is
    peak_digits: npt.NDArray[np.int32]  # [rows, width / 32] its upper digit: it counts 128 times, beside `quantised`
    half_offsets: npt.NDArray[np.int32]  # [rows, width / 16] -32 times the sum of each half of a group

    def __init__(self, rows: int, width: int, *, copies: int = 1, threads: int = 1) -> None:
        self.copies, self._apart_bytes = copies, ROWS_APART_BYTES if copies == 1 and threads > 1 else 0
        room = self._apart_bytes * (threads - 1)
        groups = width // GROUP_VALUES
        rows_read, stride = rows + MOST_LACKING_ROWS, quantised_stride(width)
        lists = 4 * rows_read * padded(groups, 2)
        counts = (4 * rows_read * width, rows_read * stride, *[lists] * 6, 2 * lists)
        sizes = [padded(count + room, LINE_BYTES) for count in counts]
        self._copy_bytes = sum(sizes)
        memory = zeros((copies * self._copy_bytes,), np.uint8)
        ends = np.cumsum(sizes)
        floats, quantised, origins, sums, starts, byte_starts, peaks, peak_digits, half_offsets = (
            memory[end - size : end] for end, size in zip(ends, sizes, strict=True)
        )
        self.floats = _shaped(floats, np.float32, rows, width)
        self.quantised = _shaped(quantised, np.int8, rows, stride)[:, :width]
        self.origins = _shaped(origins, np.float32, rows, groups)
        self.sums = _shaped(sums, np.uint16, rows, padded(groups, 2))
        self.starts = _shaped(starts, np.int32, rows, groups)
        self.byte_starts = _shaped(byte_starts, np.int32, rows, groups)
        self.peaks = _shaped(peaks, np.int32, rows, groups)
        self.peak_digits = _shaped(peak_digits, np.int32, rows, groups)
        self.half_offsets = _shaped(half_offsets, np.int32, rows, 2 * groups)

    @property
    def scales(self) -> Floats:
        """[rows, width / 32]"""
        return self.origins / np.float32(ORIGIN)

    def restored(self) -> npt.NDArray[np.float64]:
        """The quantised rows as numbers  # [rows, width]"""
        groups = self.quantised.reshape(*self.scales.shape, GROUP_VALUES).astype(np.float64)
        places = (self.peaks & (GROUP_VALUES - 1))[..., None]
        upper = (self.peak_digits >> (8 * (self.peaks & 3))).astype(np.int8)[..., None]
        np.put_along_axis(groups, places, np.take_along_axis(groups, places, -1) + 128.0 * upper, -1)
        return (groups * self.scales[..., None]).reshape(self.quantised.shape)

    def fields(self, *, floats: bool, quantised: bool, halves: bool = False) -> dict[IntEnum, int]:
        """For an operation that reads or writes these forms."""
        found: dict[IntEnum, int] = {
            OperandField.THREAD_BYTES: self._copy_bytes if self.copies > 1 else 0,
            OperandField.APART_BYTES: self._apart_bytes,
        }
        if floats:
            found[OperandField.FLOATS] = address_of(self.floats)
        if quantised:
            found |= {
                OperandField.QUANTISED: address_of(self.quantised),
                OperandField.ORIGINS: address_of(self.origins),
                OperandField.SUMS: address_of(self.sums),
                OperandField.STARTS: address_of(self.starts),
                OperandField.BYTE_STARTS: address_of(self.byte_starts),
                OperandField.PEAKS: address_of(self.peaks),
                OperandField.PEAK_DIGITS: address_of(self.peak_digits),
            }
        if halves:
            found[OperandField.HALF_OFFSETS] = address_of(self.half_offsets)
        return found

    def target_fields(self, *, floats: bool, quantised: bool, halves: bool = False) -> dict[IntEnum, int]:
        """The same, of what a gated product writes."""
        found = self.fields(floats=floats, quantised=quantised, halves=halves)
        return {GatedField(GatedField.TARGET_FLOATS + field): value for field, value in found.items()}


def _shaped(memory: Bytes, kind: type[Scalar], rows: int, width: int) -> npt.NDArray[Scalar]:
    return memory[: rows * width * np.dtype(kind).itemsize].view(kind).reshape(rows, width)
