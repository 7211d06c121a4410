"""The raw tensors of one quantised matrix, and what every layout asks of them: that parts are there, of the right kind
and shape, and how scales lie over rows and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import numpy.typing as npt

from twostroke.core.errors import ModelError
from twostroke.models.quantised.scheme import Activations, MatrixScheme, Strategy
from twostroke.models.weights.mapped_file import quoted
from twostroke.models.weights.safetensors import RawTensor
from twostroke.models.weights.stored_forms import Parts, ScaledTensor, ScaleKind
from twostroke.models.weights.tensor import WeightKind

Bytes = npt.NDArray[np.uint8]

_SCALE_ARRAYS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "|u1", "F8_E8M0": "|u1", "U8": "|u1"}


@dataclass(frozen=True)
class Stored:
    """The raw tensors of one matrix, by what the layout calls them: `weight_packed`, `weight_scale` and so on."""

    source: str
    name: str
    """Of the whole matrix, as messages and families know it."""
    parts: Mapping[str, RawTensor]
    scheme: MatrixScheme

    def error(self, complaint: str) -> ModelError:
        return ModelError(f"{self.source}: {quoted(self.name)} {complaint}")

    def need(self, part: str, *dtypes: str, ndim: int | None = None) -> RawTensor:
        found = self.parts.get(part)
        if found is None:
            raise self.error(f"is quantised, and its {part} is missing")
        return self.typed(part, found, dtypes, ndim)

    def maybe(self, part: str, *dtypes: str) -> RawTensor | None:
        found = self.parts.get(part)
        return None if found is None else self.typed(part, found, dtypes, None)

    def typed(self, part: str, found: RawTensor, dtypes: tuple[str, ...], ndim: int | None) -> RawTensor:
        if found.dtype not in dtypes:
            raise self.error(f"has a {part} of {found.dtype}, and {' or '.join(dtypes)} is asked for")
        if ndim is not None and len(found.shape) != ndim:
            raise self.error(f"has a {part} of shape {found.shape}, and {ndim} axes are asked for")
        if 0 in found.shape:
            raise self.error(f"has a {part} of shape {found.shape}: it is empty")
        return found

    def shaped(self, part: str, found: RawTensor, shape: tuple[int, ...]) -> RawTensor:
        if found.shape != shape:
            raise self.error(f"has a {part} of shape {found.shape}, and {shape} is asked for")
        return found

    def scalar(self, part: str, *, is_needed: bool) -> np.float32 | None:
        """A number that a whole tensor shares."""
        found = self.need(part, "F32", "F16", "BF16") if is_needed else self.maybe(part, "F32", "F16", "BF16")
        if found is None:
            return None
        if prod(found.shape) != 1:
            raise self.error(f"has a {part} of shape {found.shape}, and one number is asked for")
        value = np.float32(found.as_weights().to_float32().reshape(()))
        if not np.isfinite(value) or value <= 0:
            raise self.error(f"has a {part} of {value}, and a positive number is asked for")
        return value

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts.values())

    def activations(self, experts: int | None) -> Activations | None:
        meant = self.scheme.activations
        if meant is None or meant.is_dynamic or meant.strategy != "tensor":
            return meant
        part = "activation_scale" if "activation_scale" in self.parts else "input_scale"
        if experts is not None and part in self.parts and prod(self.parts[part].shape) == experts:
            return meant  # each expert has its own
        found = self.scalar(part, is_needed=False)
        return meant if found is None else replace(meant, scale=float(found))

    def tensor(self, frame: Parts, codes_of: Callable[[int, int], Bytes], experts: int | None = None) -> ScaledTensor:
        """`experts`: that the matrix stacks."""
        rows, inputs = frame.shape
        shape = (rows, inputs) if experts is None else (experts, rows // experts, inputs)
        return ScaledTensor(self.name, shape, self.nbytes, frame, codes_of, self.activations(experts))


@dataclass(frozen=True)
class Scales:
    values: npt.NDArray[np.generic]  # [row blocks, groups]
    kind: ScaleKind
    rows_per_scale: int
    group_size: int


def scale_array(raw: RawTensor) -> tuple[npt.NDArray[np.generic], ScaleKind]:
    kind = ScaleKind.E8M0 if raw.dtype in ("U8", "F8_E8M0") else ScaleKind(raw.dtype)
    return raw.data.view(_SCALE_ARRAYS[raw.dtype]), kind


def scales_of(stored: Stored, part: str, dtypes: tuple[str, ...], rows: int, inputs: int, experts: int = 1) -> Scales:
    """Of a matrix of `rows` in all, in the shape that the scheme says."""
    raw, scheme = stored.need(part, *dtypes), stored.scheme
    values, kind = scale_array(raw)
    if scheme.strategy is Strategy.TENSOR:
        if prod(raw.shape) == experts and rows % experts == 0:
            return Scales(values.reshape(experts, 1), kind, rows // experts, inputs)
        raise stored.error(f"has a {part} of shape {raw.shape}, and one number for the whole tensor is asked for")
    if scheme.strategy is Strategy.BLOCK:
        assert scheme.block is not None
        return _block_scales(stored, part, values, kind, rows // experts, inputs, experts)
    group = inputs if scheme.group_size is None else scheme.group_size
    groups = -(-inputs // group)
    is_row_of_rows = groups == 1 and raw.shape[-1] == rows
    if prod(raw.shape) != rows * groups or not (is_row_of_rows or raw.shape[-1] == groups):
        raise stored.error(f"has a {part} of shape {raw.shape}, and ({rows}, {groups}) is asked for")
    return Scales(values.reshape(rows, groups), kind, 1, min(group, inputs))


def _block_scales(
    stored: Stored, part: str, values: npt.NDArray[np.generic], kind: ScaleKind, rows: int, inputs: int, experts: int
) -> Scales:
    assert stored.scheme.block is not None
    block_rows, block_inputs = stored.scheme.block
    shape = (-(-rows // block_rows), -(-inputs // block_inputs))
    found = tuple(size for size in stored.parts[part].shape if size != 1)
    if found != tuple(size for size in ((experts,) if experts > 1 else ()) + shape if size != 1):
        raise stored.error(f"has a {part} of shape {stored.parts[part].shape}, and {shape} is asked for")
    if experts > 1 and rows % block_rows:
        raise stored.error(f"stacks experts of {rows} rows each, which are no whole blocks of {block_rows}")
    return Scales(values.reshape(experts * shape[0], shape[1]), kind, block_rows, block_inputs)


def frame_of(kind: WeightKind, rows: int, inputs: int, scales: Scales) -> Parts:
    empty = np.empty((rows, 0), dtype=np.uint8)
    return Parts(kind, (rows, inputs), empty, scales.values, scales.kind, scales.rows_per_scale, scales.group_size)
