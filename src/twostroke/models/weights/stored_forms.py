"""Weights whose numbers and scales are stored apart, as quantised folders have them: the parts, and what they mean.
Every method's files come to these few forms. How a file names and packs its parts is in `quantised/`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.models.quantised.scheme import Activations
from twostroke.models.weights.small_floats import E4M3_VALUES, E8M0_VALUES, FP4_VALUES, bfloat16_values
from twostroke.models.weights.tensor import WeightKind, WeightTensor

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

SLAB_VALUES = 1 << 20
"""Values made at a time: temporaries are small beside the result."""
_MIDDLES = {WeightKind.INT8: 128, WeightKind.INT4: 8}
"""The code that stands for zero where there are no zero points."""


class ScaleKind(Enum):
    """What `Parts.scales` holds, by the name that safetensors has for it. Numpy has no bfloat16 and no floats of 8
    bits: those are arrays of uint16 and uint8."""

    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    E4M3 = "F8_E4M3"
    E8M0 = "F8_E8M0"


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A matrix, or some rows of one: value = (level(code) - level(zero)) * scale, each scale for `rows_per_scale` rows
    and `group_size` inputs. The last block of either may be cut short."""

    kind: WeightKind
    """FP8, INT8, INT4, MXFP4_PARTS or NVFP4_PARTS."""
    shape: tuple[int, int]
    codes: Bytes  # [rows, bytes a row]: of four bits two a byte, the first below; integers are stored without a sign
    scales: npt.NDArray[np.generic]  # [ceil(rows / rows_per_scale), groups], of scale_kind
    scale_kind: ScaleKind
    rows_per_scale: int
    group_size: int
    zeros: Bytes | None = None  # [rows, groups]: the code that stands for zero; None: the middle one
    group_of_input: npt.NDArray[np.int32] | None = None  # [inputs]; None: groups follow one another
    global_scale: np.float32 | None = None
    """All scales are multiplied by it."""
    divides: bool = False
    """They are divided by it instead."""

    def scale_values(self) -> Float32:
        """As `scales` is shaped, the global one counted in."""
        match self.scale_kind:
            case ScaleKind.E4M3:
                values = E4M3_VALUES[self.scales.astype(np.uint8)]
            case ScaleKind.E8M0:
                values = E8M0_VALUES[self.scales.astype(np.uint8)]
            case ScaleKind.BF16:
                values = bfloat16_values(self.scales)
            case _:
                values = self.scales.astype(np.float32)
        if self.global_scale is None:
            return values
        with np.errstate(all="ignore"):
            result: Float32 = values / self.global_scale if self.divides else values * self.global_scale
        return result

    def input_groups(self) -> npt.NDArray[np.int32]:
        """[inputs] the group of each."""
        if self.group_of_input is not None:
            return self.group_of_input
        return (np.arange(self.shape[1]) // self.group_size).astype(np.int32)

    def integers(self) -> npt.NDArray[np.int16]:
        """[rows, inputs] of INT8 and INT4: less their zero points."""
        codes = unpack_nibbles(self.codes) if self.kind is WeightKind.INT4 else self.codes
        numbers = codes.astype(np.int16)
        if self.zeros is None:
            numbers -= _MIDDLES[self.kind]
        elif self.zeros.shape[1] == 1:
            numbers -= self.zeros
        else:
            numbers -= self.zeros[:, self.input_groups()]
        return numbers

    def levels(self) -> Float32:
        """[rows, inputs] the numbers before they are scaled."""
        match self.kind:
            case WeightKind.FP8:
                return E4M3_VALUES[self.codes]
            case WeightKind.INT8 | WeightKind.INT4:
                return self.integers().astype(np.float32)
            case _:
                return FP4_VALUES[unpack_nibbles(self.codes)]

    def rows(self, start: int, stop: int) -> Parts:
        """Some rows. A cut within a block of rows gives each row its own scales."""
        each = self.rows_per_scale
        first, last = start // each, -(-stop // each)
        scales = self.scales[first:last]
        if start % each or (stop % each and stop != self.shape[0]):
            scales = np.repeat(scales, each, axis=0)[start - first * each : stop - first * each]
            each = 1
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            codes=self.codes[start:stop],
            scales=scales,
            rows_per_scale=each,
            zeros=None if self.zeros is None else self.zeros[start:stop],
        )

    def to_float32(self) -> Float32:
        """[rows, inputs], each product rounded once."""
        result = np.empty(self.shape, dtype=np.float32)
        step = max(1, SLAB_VALUES // max(1, self.shape[1]))
        step = max(step // self.rows_per_scale, 1) * self.rows_per_scale
        with np.errstate(all="ignore"):  # a corrupt scale gives nan or inf, and is found by its user
            for start in range(0, self.shape[0], step):
                part = self.rows(start, min(start + step, self.shape[0]))
                np.multiply(part.levels(), part.spread_scales(), out=result[start : start + step])
        return result

    def spread_scales(self) -> Float32:
        """[rows, inputs], or [rows, 1] where all inputs share one."""
        by_row = np.repeat(self.scale_values(), self.rows_per_scale, axis=0)[: self.shape[0]]
        return by_row if by_row.shape[1] == 1 else by_row[:, self.input_groups()]


class ScaledTensor(WeightTensor):
    """A tensor of a folder that stores scales apart. Its codes are read when they are asked for, and not kept: some
    files have to be turned round for it. `shape` has an axis more, in front, where a tensor stacks experts."""

    __slots__ = ("_codes_of", "_frame", "_start", "activations", "stored_bytes")
    activations: Activations | None
    stored_bytes: int
    """Scales and all."""
    _frame: Parts
    _codes_of: Callable[[int, int], Bytes]
    _start: int

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        stored_bytes: int,
        frame: Parts,
        codes_of: Callable[[int, int], Bytes],
        activations: Activations | None = None,
        start: int = 0,
    ) -> None:
        """`frame` is the whole matrix, of which this tensor may be a piece, with rows of codes that are empty;
        `codes_of(start, stop)` gives the codes of some of its rows."""
        fields = {"name": name, "kind": frame.kind, "shape": shape, "stored_bytes": stored_bytes, "_frame": frame}
        for field, value in (fields | {"_codes_of": codes_of, "activations": activations, "_start": start}).items():
            object.__setattr__(self, field, value)

    @property
    def outline(self) -> Parts:
        """The parts without codes: what can be known without reading them."""
        return self._frame.rows(self._start, self._start + self.num_rows)

    @property
    def num_rows(self) -> int:
        """Of all experts, where they are stacked."""
        return int(np.prod(self.shape[:-1]))

    def parts(self) -> Parts:
        return replace(self.outline, codes=self._codes_of(self._start, self._start + self.num_rows))

    @property
    def data(self) -> Bytes:
        return self.parts().codes

    @property
    def nbytes(self) -> int:
        return self.stored_bytes

    def glance(self, num_bytes: int) -> bytes:
        first, last = self.rows(0, 1).parts(), self.rows(self.num_rows - 1, self.num_rows).parts()
        ends = (first.codes[0, :num_bytes], last.codes[-1, -num_bytes:], first.scales, last.scales)
        return b"".join(part.tobytes() for part in ends)

    def rows(self, start: int, stop: int) -> ScaledTensor:
        share = self.stored_bytes * (stop - start) // max(1, self.num_rows)
        shape, first = (stop - start, self.shape[-1]), self._start + start
        return ScaledTensor(self.name, shape, share, self._frame, self._codes_of, self.activations, first)

    @property
    def column_unit(self) -> int:
        own = self._frame
        together = 1 if own.group_of_input is not None or own.scales.shape[1] == 1 else own.group_size
        return math.lcm(together, self.kind.block_values)

    def columns(self, start: int, stop: int) -> ScaledTensor:
        own, codes_of, first_row = self.outline, self._codes_of, self._start
        first, last = self.kind.row_bytes(start), self.kind.row_bytes(stop)
        groups = slice(None)
        if own.group_of_input is None and own.scales.shape[1] > 1:
            groups = slice(start // own.group_size, -(-stop // own.group_size))

        def own_codes(begin: int, end: int) -> Bytes:
            return codes_of(first_row + begin, first_row + end)[:, first:last]

        shape = (self.num_rows, stop - start)
        frame = replace(
            own,
            shape=shape,
            codes=np.empty((self.num_rows, 0), dtype=np.uint8),
            scales=own.scales[:, groups],
            zeros=own.zeros if own.zeros is None or own.zeros.shape[1] == 1 else own.zeros[:, groups],
            group_of_input=None if own.group_of_input is None else own.group_of_input[start:stop],
        )
        share = self.stored_bytes * (stop - start) // max(1, self.shape[-1])
        return ScaledTensor(self.name, shape, share, frame, own_codes, self.activations)

    def every(self, first: int, step: int) -> ScaledTensor:
        count = len(range(first, self.num_rows, step))
        own, begin, codes_of = self.outline, self._start + first, self._codes_of
        scales = own.scales
        if own.rows_per_scale > 1:
            scales = np.repeat(scales, own.rows_per_scale, axis=0)[: self.num_rows]
        zeros = None if own.zeros is None else own.zeros[first::step]
        frame = _frame_like(own, (count, self.shape[-1]), scales[first::step], 1, zeros=zeros)

        def own_codes(start: int, stop: int) -> Bytes:
            if stop <= start:
                return codes_of(begin, begin)
            return codes_of(begin + start * step, begin + (stop - 1) * step + 1)[::step]

        share = self.stored_bytes * count // max(1, self.num_rows)
        return ScaledTensor(self.name, frame.shape, share, frame, own_codes, self.activations)

    def turned(self) -> ScaledTensor:
        """Of numbers of a byte each: some files stack experts with inputs before outputs."""
        own, codes_of, first = self.outline, self._codes_of, self._start
        if own.kind is not WeightKind.FP8:
            raise ValueError(f"a matrix in {own.kind.name} has its outputs first, and cannot be turned")
        rows, inputs = own.shape
        scales = np.ascontiguousarray(own.scales.T)
        frame = _frame_like(own, (inputs, rows), scales, own.group_size, group_size=own.rows_per_scale)

        def own_codes(start: int, stop: int) -> Bytes:
            return np.ascontiguousarray(codes_of(first, first + rows)[:, start:stop].T)

        return ScaledTensor(self.name, frame.shape, self.stored_bytes, frame, own_codes, self.activations)

    def flat(self) -> ScaledTensor:
        return self.rows(0, self.num_rows)

    def take_rows(self, order: npt.NDArray[np.intp]) -> ScaledTensor:
        """A view with some rows in another order. Blocks of rows that stay together keep sharing their scales."""
        own, begin, codes_of, each = self.outline, self._start, self._codes_of, self.outline.rows_per_scale
        owners = order // each
        firsts = order[::each]
        is_whole = len(order) % each == 0 and not (firsts % each).any()
        if is_whole and np.array_equal(order.reshape(-1, each), firsts[:, None] + np.arange(each)):
            owners = owners[::each]
        else:
            each = 1
        zeros = None if own.zeros is None else own.zeros[order]
        frame = _frame_like(own, (len(order), self.shape[-1]), own.scales[owners], each, zeros=zeros)

        def own_codes(start: int, stop: int) -> Bytes:
            if stop <= start:
                return codes_of(begin, begin)
            wanted = order[start:stop]
            low = int(wanted.min())
            return codes_of(begin + low, begin + int(wanted.max()) + 1)[wanted - low]

        share = self.stored_bytes * len(order) // max(1, self.num_rows)
        return ScaledTensor(self.name, frame.shape, share, frame, own_codes, self.activations)

    def to_float32(self) -> Float32:
        return self.parts().to_float32().reshape(self.shape)


def _frame_like(
    own: Parts, shape: tuple[int, int], scales: npt.NDArray[np.generic], rows_per_scale: int, **changes: Any
) -> Parts:
    """Parts without codes, of another shape."""
    codes = np.empty((shape[0], 0), dtype=np.uint8)
    return replace(own, shape=shape, codes=codes, scales=scales, rows_per_scale=rows_per_scale, **changes)


def unpack_nibbles(packed: Bytes) -> Bytes:
    """[rows, bytes] to [rows, 2 * bytes]: of each byte the low nibble, then the high one."""
    result = np.empty((*packed.shape, 2), dtype=np.uint8)
    np.bitwise_and(packed, 15, out=result[..., 0])
    np.right_shift(packed, 4, out=result[..., 1])
    return result.reshape(*packed.shape[:-1], -1)


def pack_nibbles(codes: Bytes) -> Bytes:
    """The way back."""
    packed: Bytes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed
