"""One stored tensor, as its bytes lie in the file, with its kind. Knows how rows are laid out; what a kind's numbers
mean is in `quantisation.py`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np
import numpy.typing as npt


class WeightKind(Enum):
    """How numbers are stored: (values a block, bytes a block). A third entry keeps a kind from being an alias of
    another whose blocks have the same sizes."""

    F32 = (1, 4)
    F16 = (1, 2)
    BF16 = (1, 2, "bf16")
    Q8_0 = (32, 34)
    Q4_0 = (32, 18)
    Q4_1 = (32, 20)
    Q5_0 = (32, 22)
    Q5_1 = (32, 24)
    Q2_K = (256, 84)
    Q3_K = (256, 110)
    Q4_K = (256, 144)
    Q5_K = (256, 176)
    Q6_K = (256, 210)
    IQ1_S = (256, 50)
    IQ1_M = (256, 56)
    IQ2_XXS = (256, 66)
    IQ2_XS = (256, 74)
    IQ2_S = (256, 82)
    IQ3_XXS = (256, 98)
    IQ3_S = (256, 110, "iq3_s")
    IQ4_XS = (256, 136)
    IQ4_NL = (32, 18, "iq4_nl")
    TQ1_0 = (256, 54)
    TQ2_0 = (256, 66, "tq2_0")
    MXFP4 = (32, 17)
    NVFP4 = (64, 36)
    FP8 = (1, 1)  # from here on: numbers alone, with scales apart (`stored_forms.py`)
    INT8 = (1, 1, "int8")
    INT4 = (2, 1)
    MXFP4_PARTS = (2, 1, "mxfp4")
    NVFP4_PARTS = (2, 1, "nvfp4")

    @property
    def block_values(self) -> int:
        return int(self.value[0])

    @property
    def block_bytes(self) -> int:
        return int(self.value[1])

    @property
    def is_quantised(self) -> bool:
        return self.bits_per_weight < 16

    @property
    def has_parts(self) -> bool:
        """Whether scales are stored apart: such tensors are a `ScaledTensor`."""
        return self in _WITH_PARTS

    def row_bytes(self, num_values: int) -> int:
        return num_values // self.block_values * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.block_bytes / self.block_values


_WITH_PARTS = {
    WeightKind.FP8,
    WeightKind.INT8,
    WeightKind.INT4,
    WeightKind.MXFP4_PARTS,
    WeightKind.NVFP4_PARTS,
}
BLOCK_KINDS = tuple(kind for kind in WeightKind if kind not in _WITH_PARTS)
"""Kinds whose rows hold all that they need, as GGUF has them."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """Rows first, as a matrix multiplies: `shape` is (outputs, inputs), or (n,) for a vector."""

    name: str
    kind: WeightKind
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # [rows, bytes a row], often a read-only view of a memory map; a vector is one row

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def glance(self, num_bytes: int) -> bytes:
        """A few bytes of both ends: what a file that was changed is known by, as far as a glance goes."""
        return self.data[0, :num_bytes].tobytes() + self.data[-1, -num_bytes:].tobytes()

    def flat(self) -> WeightTensor:
        """[experts, rows, inputs] as [experts * rows, inputs], which its bytes are already."""
        return WeightTensor(self.name, self.kind, (self.shape[0] * self.shape[1], self.shape[2]), self.data)

    def shaped(self, shape: tuple[int, ...]) -> WeightTensor:
        """The same numbers in a shape that differs in axes of length 1: [channels, 1, taps], as folders hold a
        convolution, as [channels, taps]; [n, 1] as a vector of n."""
        return WeightTensor(self.name, self.kind, shape, self.data.reshape(prod(shape[:-1]), -1))

    def rows(self, start: int, stop: int) -> WeightTensor:
        """A view of some rows of a matrix: how fused projections are split."""
        return WeightTensor(self.name, self.kind, (stop - start, *self.shape[1:]), self.data[start:stop])

    @property
    def column_unit(self) -> int:
        """Columns are cut at multiples of it: numbers that share a block stay together."""
        return self.kind.block_values

    def columns(self, start: int, stop: int) -> WeightTensor:
        """A view of some inputs of a matrix, at multiples of `column_unit`, or up to its end."""
        first, last = self.kind.row_bytes(start), self.kind.row_bytes(stop)
        return WeightTensor(self.name, self.kind, (self.shape[0], stop - start), self.data[:, first:last])

    def cut(self, axis: int, start: int, stop: int) -> WeightTensor:
        """A view of some rows (axis 0) or inputs (axis 1) of a matrix, or of some numbers of a vector."""
        if len(self.shape) == 1:
            first, last = self.kind.row_bytes(start), self.kind.row_bytes(stop)
            return WeightTensor(self.name, self.kind, (stop - start,), self.data[:, first:last])
        return self.rows(start, stop) if axis == 0 else self.columns(start, stop)

    def every(self, first: int, step: int) -> WeightTensor:
        """A view of every `step`th row, or number of a vector, from the first named one on."""
        count = len(range(first, self.shape[0], step))
        if len(self.shape) > 1:
            return WeightTensor(self.name, self.kind, (count, *self.shape[1:]), self.data[first::step])
        numbers = self.data.reshape(self.shape[0], self.kind.block_bytes)[first::step]
        return WeightTensor(self.name, self.kind, (count,), numbers.reshape(1, -1))

    def turned(self) -> WeightTensor:
        """A copy of a matrix of floats with rows and columns exchanged."""
        rows, columns = self.shape
        numbers = self.data.reshape(rows, columns, self.kind.block_bytes).swapaxes(0, 1)
        return WeightTensor(self.name, self.kind, (columns, rows), numbers.reshape(columns, -1))

    def take_rows(self, order: npt.NDArray[np.intp]) -> WeightTensor:
        """A copy with the rows in another order."""
        return WeightTensor(self.name, self.kind, (len(order), *self.shape[1:]), self.data[order])

    def to_float32(self) -> npt.NDArray[np.float32]:
        from twostroke.models.weights.quantisation import dequantise

        return dequantise(self.kind, self.data).reshape(self.shape)


def from_float32(name: str, values: npt.NDArray[np.float32]) -> WeightTensor:
    """An F32 tensor over an array: for norms that a loader adjusts, and for random weights."""
    rows = values.shape[0] if values.ndim > 1 else 1
    data = np.ascontiguousarray(values, dtype=np.float32).reshape(rows, -1).view(np.uint8)
    return WeightTensor(name, WeightKind.F32, tuple(values.shape), data)
