"""The kernels that multiply, by the names that tables know them by. A new one is added here, and launched by
`products.py`, or by `moe.py` if it takes experts. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cuda.kernels.cluster_tiles import ClusterProducts
from twostroke.backends.cuda.kernels.expert_tiles import (
    FewExperts,
    GroupedExperts,
    HopperExperts,
    PackedExperts,
    StoredFewExperts,
    StoredGroupedExperts,
    UnitExperts,
    UnpackedExperts,
)
from twostroke.backends.cuda.kernels.float8_tiles import (
    DENSE_FLOAT8,
    ROWS_FLOAT8,
    UNITS_FLOAT8,
    Float8Experts,
    Float8Products,
    LibraryFloat8Products,
    in_float8,
)
from twostroke.backends.cuda.kernels.gemv_config import GemvProducts
from twostroke.backends.cuda.kernels.packed_format import (
    FOUR_BITS,
    FP8,
    GROUPED_CODES,
    LOW_BIT_CODES,
    UNIT_CODES,
    Code,
)
from twostroke.backends.cuda.kernels.packed_tiles import PackedProducts
from twostroke.backends.cuda.kernels.product import Card, Kernel, Product, Settings
from twostroke.backends.cuda.kernels.row_forms import ROW_FORMS


@dataclass(frozen=True, slots=True)
class CublasTile:
    """cuBLAS cuts by rules of its own."""

    sums: int = 0


class CublasProducts:
    """Takes everything that is held in the type that is computed in."""

    name, form, fuses = "cublas", "plain", False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> CublasTile | str:
        return "it takes one matrix" if product.experts else CublasTile()

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return [{}]


class ScaledProducts:
    """Float8 by float8, on tensor cores, by the library: rows are brought to float8 first, each with a scale."""

    name, form, fuses = "scaled", FP8.name, False

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> CublasTile | str:
        if not card.has_float8:
            return "it needs tensor cores that multiply float8"
        if product.experts or product.shape[-2] % 16:
            return "it takes one matrix, with outputs in sixteens"
        return CublasTile()

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return [{}]


class UnpackedProducts:
    """Weights of one code, brought to the type that is computed in, in a scratch matrix, and multiplied by cuBLAS."""

    fuses = False

    def __init__(self, code: Code) -> None:
        self.name, self.form = f"{code.name}_unpacked", code.name

    def tile(self, product: Product, rows: int, card: Card, settings: Settings) -> CublasTile | str:
        return "it takes one matrix" if product.experts else CublasTile()

    def candidates(self, product: Product, rows: int, card: Card) -> list[Settings]:
        return [{}]


FLOAT8_BY_RULE = 160
"""Rows up to which float8 weights are brought to bfloat16 where no table says otherwise."""
CUBLAS, GROUPED_EXPERTS = CublasProducts(), GroupedExperts()
FEW_LOW_BIT = (PackedProducts(FP8, FLOAT8_BY_RULE), *(PackedProducts(code) for code in (*FOUR_BITS, *GROUPED_CODES)))
UNPACKED = tuple(UnpackedProducts(code) for code in (*LOW_BIT_CODES, *GROUPED_CODES))
DENSE_IN_FLOAT8 = tuple(Float8Products(code) for code in DENSE_FLOAT8)
LIBRARY_IN_FLOAT8 = tuple(LibraryFloat8Products(code) for code in DENSE_FLOAT8)
EXPERTS_IN_FLOAT8 = tuple(Float8Experts(code) for code in (*UNITS_FLOAT8, *ROWS_FLOAT8))
LOW_BIT: tuple[Kernel, ...] = (*FEW_LOW_BIT, ScaledProducts(), *DENSE_IN_FLOAT8, *UNPACKED)
UNPACKED_EXPERTS = tuple(UnpackedExperts(code) for code in UNIT_CODES)
STORED_EXPERTS: tuple[Kernel, ...] = (
    *EXPERTS_IN_FLOAT8,
    *(UnitExperts(code) for code in UNIT_CODES),
    *UNPACKED_EXPERTS,
    *(StoredFewExperts(form) for form in ROW_FORMS),
    *(StoredGroupedExperts(form) for form in ROW_FORMS),
)
ANYWHERE: tuple[Kernel, ...] = (*LOW_BIT, CUBLAS, GROUPED_EXPERTS, *STORED_EXPERTS)
"""What computes a product, of weights in its form, that no table has a line for: the first that takes it, by a rule of
its own. The last of each form takes it on any card."""
DENSE: tuple[Kernel, ...] = (
    *(PackedProducts(), GemvProducts(), ClusterProducts(), CUBLAS),
    *(*LOW_BIT, *LIBRARY_IN_FLOAT8),
)
EXPERTS: tuple[Kernel, ...] = (PackedExperts(), FewExperts(), HopperExperts(), GROUPED_EXPERTS, *STORED_EXPERTS)
FLOAT8_FORMS = frozenset(in_float8(code) for code in (*DENSE_FLOAT8, *UNITS_FLOAT8, *ROWS_FLOAT8))
"""Forms that weights may be read in for prompts, beside the one that they are held in."""
NEEDS_ROOM = frozenset(
    (*(kernel.name for kernel in UNPACKED_EXPERTS), *(Float8Experts(code).name for code in UNITS_FLOAT8))
)
"""Kernels that bring experts' weights to another form first, in room that short steps have none of."""
BY_FLOATS = frozenset((*(kernel.name for kernel in UNPACKED), *(kernel.name for kernel in UNPACKED_EXPERTS)))
"""Kernels that bring weights to the type that is computed in first."""
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*DENSE, *EXPERTS)}


def kernels_for(product: Product) -> tuple[Kernel, ...]:
    return EXPERTS if product.experts else DENSE
