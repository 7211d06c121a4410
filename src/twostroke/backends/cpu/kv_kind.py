"""The kinds of numbers that K and V are stored in, what a token takes in each, and which one a machine should use.
How kernels write and multiply them is in `kernels/kv_code.py`."""

from __future__ import annotations

from enum import Enum

from twostroke.backends.cpu.isa import InstructionSet

SCALE_BYTES = 2
"""Of K, in bf16. Of V, as a logarithm. Both are rounded up before numbers are divided by them."""
STEPS_A_DOUBLING = 512
"""Of the logarithms of scales."""


class KVKind(Enum):
    F16 = "f16"
    """Multiplied as f32: the most exact, on every machine."""
    BF16 = "bf16"
    """Multiplied in pairs, with queries and weights rounded to bf16: twice as fast where the CPU has bf16 dots."""
    INT8 = "int8"
    """8 bits and a scale for each head and token, multiplied as integers: about half of the memory."""

    @property
    def element_bytes(self) -> int:
        return 1 if self is KVKind.INT8 else 2

    @property
    def has_scales(self) -> bool:
        return self is KVKind.INT8

    def token_bytes(self, head_dim: int) -> int:
        """K and V of one token and one KV head."""
        scales = 2 * SCALE_BYTES if self.has_scales else 0
        return 2 * head_dim * self.element_bytes + scales


def fastest(isa: InstructionSet) -> KVKind:
    """That keeps 16 bits."""
    return KVKind.BF16 if isa.has_bf16_dot else KVKind.F16
