"""Turns in a chain of dependent launches (`target.dependent`): when a kernel's programs wait for the kernel ahead to
have ended, when they let those of the next one start where there is room, and what they ask for meanwhile."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_next_and_wait(PDL: tl.constexpr):
    """What comes next may start at once: it waits, too, before it reads what this kernel or one ahead writes."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def wait_and_start_next(PDL: tl.constexpr):
    """What comes next starts when all ahead of this kernel is written, and may read that before it waits itself."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


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
