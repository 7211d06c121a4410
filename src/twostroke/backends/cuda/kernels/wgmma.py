"""Warp-group products of Hopper (wgmma) as functions for kernels in CUDA C++: an instruction names every register of
its sums, so it is written out for each width. Knows text only."""

from __future__ import annotations

from typing import Final

import torch

ELEMENTS: Final = {torch.bfloat16: "bf16", torch.float16: "f16"}


def product_function(
    name: str, columns: int, dtype: torch.dtype, *, from_registers: bool = False, columns_contiguous: bool = False
) -> str:
    """`void name(float (&sums)[columns / 2], rows, u64 columns, int keep)`: 64 rows by 16 by `columns`, added to the
    sums where they are to be kept. The left operand is in shared memory (a u64 that describes it) or in four registers
    of each thread (a u32*). `columns_contiguous`: the right operand's columns lie beside each other, not its depth."""
    sums = range(columns // 2)
    registers = ", ".join(f"%{i}" for i in sums)
    operands = ", ".join(f'"+f"(sums[{i}])' for i in sums)
    given = 4 if from_registers else 1
    rows = [f"%{len(sums) + i}" for i in range(given)]
    right, keep = f"%{len(sums) + given}", f"%{len(sums) + given + 1}"
    if from_registers:
        left_type, left = "const u32*", f"{{{', '.join(rows)}}}"
        inputs = ", ".join(f'"r"(rows[{i}])' for i in range(4))
        orders = f"{int(columns_contiguous)}"
    else:
        left_type, left, inputs = "u64", rows[0], '"l"(rows)'
        orders = f"0, {int(columns_contiguous)}"
    element = ELEMENTS[dtype]
    parameters = f"float (&sums)[{len(sums)}], {left_type} rows, u64 columns, int keep"
    return (
        f"__device__ __forceinline__ void {name}({parameters}) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, {keep}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} "
        f'{{{registers}}}, {left}, {right}, p, 1, 1, {orders}; }}" '
        f': {operands} : {inputs}, "l"(columns), "r"(keep));\n}}\n'
    )
