"""What attention kernels do to a score between the two products: scale, soft cap, and base two."""

# ruff: noqa: N803, RET505
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


def score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """What `cap_scores` multiplies by: before and after the soft cap, with log2(e) folded in."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2_E)


@triton.jit
def cap_scores(scores, score_scale, cap_log2, HAS_SOFTCAP: tl.constexpr):
    """Scores times scale and log2(e), through the soft cap if there is one."""
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which is right at both infinities; 2 log2(e) = 2.885...
        return cap_log2 * (1.0 - 2.0 / (tl.exp2(scores * (score_scale * 2.8853900817779268)) + 1.0))
    else:
        return scores * score_scale
