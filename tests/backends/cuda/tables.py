"""Tables for tests: one line of each role serves every size, since the nearest is taken."""

from __future__ import annotations

from typing import get_args

import torch

from twostroke.backends.cuda.kernels.product import Card, Product, Role
from twostroke.backends.cuda.products import card_of
from twostroke.backends.cuda.tuned_table import Choices, Forms, Line, Table

H200 = Card("NVIDIA H200", 132, has_hopper_kernels=True)
FMA = {"method": "fma", "block_n": 4, "block_k": 1024, "num_warps": 4}


def table_of(forms: Forms) -> Table:
    roles = get_args(Role)
    return Table("a test", {Product(role, 64, 64, bias): forms for role in roles for bias in (False, True)})


def fused_up_to(rows: int | None, device: str, dtype: torch.dtype) -> Choices | None:
    """The fused kernels for so many rows and cuBLAS for more; None: as the tables say."""
    if rows is None:
        return None
    lines = (Line(1, rows, "gemv", FMA),) if rows else ()
    return Choices(table_of({"plain": lines}), card_of(torch.device(device), dtype))
