# ruff: noqa: N803  (constant parameters of kernels are written in capitals)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Asking for what a kernel will read, before it may begin."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch_to_l2(rows, WIDTH: tl.constexpr):
    """Ask for the beginnings of rows to be brought to L2, a line of 128 bytes at a time. rows: pointers [count, 1]."""
    line: tl.constexpr = 1024 // rows.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, line))
    offsets = tl.minimum(tl.arange(0, lines) * line, WIDTH - 1)
    addresses = (rows + offsets[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )
