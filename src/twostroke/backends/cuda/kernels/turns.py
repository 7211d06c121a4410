# ruff: noqa: N803  (constant parameters of kernels are written in capitals)
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Turns in a chain of dependent launches (`target.dependent`): when a kernel's programs wait for the kernel ahead to
have ended, and when they let those of the next one start where there is room."""

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
