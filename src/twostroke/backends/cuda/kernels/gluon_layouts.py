"""How blocks of matrices lie in shared memory, as hosts describe them to Gluon's kernels."""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from triton.experimental.gluon import language as gl

ELEMENT_TYPES: Final = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@cache
def shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of a block that a bulk copy brings. Kept: Gluon takes longer to think of it than a kernel to be launched."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENT_TYPES[dtype])
