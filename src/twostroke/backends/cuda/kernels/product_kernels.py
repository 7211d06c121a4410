"""The kernels that multiply, by the names that tables know them by. A new one is added here, and launched by
`products.py`, or by `moe.py` if it takes experts. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.backends.cuda.kernels.cluster_tiles import ClusterProducts
from twostroke.backends.cuda.kernels.expert_tiles import FewExperts, GroupedExperts, HopperExperts, PackedExperts
from twostroke.backends.cuda.kernels.gemv_config import GemvProducts
from twostroke.backends.cuda.kernels.packed_tiles import PackedProducts
from twostroke.backends.cuda.kernels.product import Card, Kernel, Product, Settings


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


CUBLAS, GROUPED_EXPERTS = CublasProducts(), GroupedExperts()
ANYWHERE: tuple[Kernel, ...] = (CUBLAS, GROUPED_EXPERTS)
"""What computes a product, on any card, that no table has a line for: by a rule of its own."""
DENSE: tuple[Kernel, ...] = (PackedProducts(), GemvProducts(), ClusterProducts(), CUBLAS)
EXPERTS: tuple[Kernel, ...] = (PackedExperts(), FewExperts(), HopperExperts(), GROUPED_EXPERTS)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (*DENSE, *EXPERTS)}


def kernels_for(product: Product) -> tuple[Kernel, ...]:
    return EXPERTS if product.experts else DENSE
