"""A soft cap, as attention's kernels in Triton have it."""

# ruff: noqa: RET505
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def capped(scores, cap_factor):
    """tanh(x) = 1 - 2 / (exp2(2 log2(e) x) + 1), which is right at both infinities, of scores times a factor in which
    2 log2(e) is; the scores themselves where the factor is None."""
    if cap_factor is None:
        return scores
    else:
        return 1.0 - 2.0 / (tl.exp2(scores * cap_factor) + 1.0)
