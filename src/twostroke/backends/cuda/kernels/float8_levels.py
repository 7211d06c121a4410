"""Where numbers of few bits, and their scales, are put for products in float8: numbers by rows, in the order of their
inputs, and scales group by group, so that a tile's lie side by side."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_level(
    level, scale, out, scales, expert, row, is_row, inputs, rows, rounds, SCALES: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Of one round of inputs. level: float32, whole in e4m3; scale: the same shape, or of rows alone; SCALES: that a
    round has; 0: a row has one."""
    tl.store(out + (expert * rows + row) * (rounds * DEPTH) + inputs, level.to(out.dtype.element_ty), mask=is_row)
    if SCALES == 0:
        places, is_first = scales + expert * rows + row + inputs * 0, inputs == 0
    else:
        group = inputs // (DEPTH // SCALES)
        places = scales + (expert * (rounds * SCALES) + group) * rows + row
        is_first = inputs % (DEPTH // SCALES) == 0
    tl.store(places, scale + tl.zeros_like(level), mask=is_row & is_first)
