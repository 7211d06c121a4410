"""A weight on the device, in every form that it is held in: as it is computed with, packed in twelve bits for decode,
or only in few bits. A form is a dataclass that knows its bytes. A kernel says which form it reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from twostroke.backends.cuda.kernels.eight_bits import EightBitMatrix
from twostroke.backends.cuda.kernels.expert_numbers import ExpertMatrix
from twostroke.backends.cuda.kernels.expert_units import ExpertUnits
from twostroke.backends.cuda.kernels.float8_tiles import in_float8
from twostroke.backends.cuda.kernels.four_bits import FourBitMatrix
from twostroke.backends.cuda.kernels.grouped_numbers import GroupedMatrix
from twostroke.backends.cuda.kernels.packed_format import FP8, Code
from twostroke.backends.cuda.kernels.packing import PackedMatrix, pack_by_kernel
from twostroke.backends.cuda.kernels.product import Product


class Form(Protocol):
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A weight in the type that products are computed in."""

    weight: torch.Tensor  # [..., outputs, inputs]; in a gated product first gate, then up

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


LowBitMatrix = EightBitMatrix | FourBitMatrix | GroupedMatrix | ExpertMatrix | ExpertUnits


def empty_low_bit(product: Product, code: Code, device: torch.device, *, has_order: bool = False) -> LowBitMatrix:
    """Returns room for a matrix in a code of few bits, to be filled. `has_order` means that its inputs have an order of
    their own."""
    if code.by_rows is not None:
        return ExpertMatrix.empty(product.shape, code.by_rows, device)
    if product.experts:
        return ExpertUnits.empty(product.shape, code, device, is_gated=product.is_gated)
    if code.grouping is not None:
        return GroupedMatrix.empty(product.shape, code, device, is_gated=product.is_gated, has_order=has_order)
    if code is FP8:
        return EightBitMatrix.empty(product.shape, device, is_gated=product.is_gated)
    return FourBitMatrix.empty(product.shape, code, device, is_gated=product.is_gated)


@dataclass(slots=True, eq=False)
class Matrix:
    """A weight with all its forms. Whether it can be packed shows only when its weights are there, after the model was
    made. So a caller that multiplies asks for its forms each time, and keeps none."""

    name: str
    product: Product
    forms: dict[str, Form]  # by the names that kernels ask for
    bias: torch.Tensor | None = None
    in_float8: bool = False
    """Whether rows may be rounded to float8 for it. That is possible for weights in few bits that float8 holds
    exactly."""

    @property
    def form_names(self) -> tuple[str, ...]:
        """The names of its forms. The last is read at any number of rows, those before it only if a table says so."""
        return (in_float8(self.low_bit.code), *self.forms) if self.in_float8 else tuple(self.forms)

    @property
    def weight(self) -> torch.Tensor:
        plain = self.forms["plain"]
        assert isinstance(plain, Plain)
        return plain.weight

    @property
    def packed(self) -> PackedMatrix | None:
        form = self.forms.get("packed")
        assert form is None or isinstance(form, PackedMatrix)
        return form

    @property
    def low_bit(self) -> LowBitMatrix:
        """The only form of a matrix that is held in few bits."""
        (form,) = self.forms.values()
        assert isinstance(form, LowBitMatrix)
        return form

    @property
    def for_experts(self) -> torch.Tensor | ExpertMatrix:
        """What Triton kernels read of experts' weights: floats, or few bits as they are."""
        stored = (form for form in self.forms.values() if isinstance(form, ExpertMatrix))
        return next(stored, None) or self.weight

    @property
    def coded_experts(self) -> PackedMatrix | ExpertUnits:
        """The form that the product of experts in CUDA C++ reads."""
        found = self.packed or self.low_bit
        assert isinstance(found, PackedMatrix | ExpertUnits)
        return found

    def as_floats(self) -> torch.Tensor:
        """Returns the weights as they are held, in float32 [..., outputs, inputs]."""
        return self.weight.float() if "plain" in self.forms else self.low_bit.dequantised()

    @property
    def num_bytes(self) -> int:
        return sum(form.num_bytes for form in self.forms.values())

    def make_room_for_packed(self) -> None:
        shape, device = tuple(self.weight.shape), self.weight.device
        self.forms["packed"] = PackedMatrix.empty(shape, device, is_gated=self.product.is_gated)


def fill_packed(matrices: Iterable[Matrix]) -> list[tuple[Matrix, PackedMatrix]]:
    """Launches the kernels that fill the packed forms that have room, and returns these forms."""
    packed = [(matrix, form) for matrix in matrices if (form := matrix.packed) is not None]
    for matrix, form in packed:
        pack_by_kernel(matrix.weight, form)
    return packed


def pack(matrices: Iterable[Matrix]) -> tuple[str, ...]:
    """Fills the packed forms. Returns the names of matrices that stay plain because their weights are not all finite.
    Their packed forms are dropped."""
    packed = fill_packed(matrices)
    if not packed:
        return ()
    # A row whose largest exponent is infinity's has an infinite factor. All rows are read at once: each reading waits.
    are_finite = torch.stack([form.factors.isfinite().all() for _, form in packed]).tolist()
    left_plain = [matrix for (matrix, _), is_finite in zip(packed, are_finite, strict=True) if not is_finite]
    for matrix in left_plain:
        del matrix.forms["packed"]
    return tuple(matrix.name for matrix in left_plain)
