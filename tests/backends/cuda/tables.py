"""Tables for tests: one line of each role serves every size, since the nearest is taken."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch

from twostroke.backends.cuda.kernels.product import Card, Product, Role, Settings
from twostroke.backends.cuda.matrix import Matrix, Plain
from twostroke.backends.cuda.moe import MoeWeights
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.tuned_table import NO_END, Choices, Forms, Table, TableLine, table_for
from twostroke.models.spec import MoeSpec

H200 = Card("NVIDIA H200", 132, has_hopper_kernels=True)
FMA = {"method": "fma", "block_n": 4, "block_k": 1024, "num_warps": 4}


def table_of(forms: Forms) -> Table:
    """Experts are as on an H200."""
    experts = {product: forms for product, forms in table_for(H200.name).products.items() if product.experts}
    dense = {Product(role, 64, 64, bias): forms for role in get_args(Role) for bias in (False, True)}
    return Table("a test", {**dense, **experts})


def experts_by(
    gates: Settings, downs: Settings, device: str, dtype: torch.dtype, *, kernel: str | None = None
) -> Choices:
    """Experts of any size and number by the grouped kernel with these settings; gates by another kernel, if named."""
    lines = {
        Product("gated", 64, 64, experts=1): TableLine(1, NO_END, kernel or "grouped_experts", gates),
        Product("join", 64, 64, experts=1): TableLine(1, NO_END, "grouped_experts", downs),
    }
    table = Table("a test", {product: {"plain": (line,)} for product, line in lines.items()})
    return Choices(table, card_of(torch.device(device), dtype))


def empty_experts(moe: MoeSpec, hidden: int, dtype: torch.dtype, device: str) -> MoeWeights:
    """To be filled: of `gate_up`, expert e's rows are its gate, where it has one, then its up."""
    experts, width = moe.num_experts, moe.expert_intermediate_size
    matrices = [
        Matrix(name, product, {"plain": Plain(torch.empty(product.shape, dtype=dtype, device=device))})
        for name, product in (
            ("gate_up", Product("gated" if moe.is_gated else "activated", width, hidden, experts=experts)),
            ("down", Product("join", hidden, width, experts=experts)),
        )
    ]
    return MoeWeights(torch.empty(experts, hidden, dtype=dtype, device=device), *matrices)


def fused_up_to(rows: int | None, device: str, dtype: torch.dtype) -> Choices | None:
    """The fused kernels for so many rows and cuBLAS for more; None: as the tables say."""
    if rows is None:
        return None
    lines = (TableLine(1, rows, "gemv", FMA),) if rows else ()
    return Choices(table_of({"plain": lines}), card_of(torch.device(device), dtype))


def by_library(device: str, dtype: torch.dtype, *, in_float8: bool) -> Choices:
    """Dense products by the library. `in_float8`: whether rows are brought to float8 to meet weights in float8,
    whatever the device would do; a host does the same in float32."""
    card = replace(card_of(torch.device(device), dtype), has_float8=in_float8)
    return Choices(table_of({"plain": ()}), card)
