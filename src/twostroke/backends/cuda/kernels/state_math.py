"""What both phases of layers that keep matrices compute, and the shapes of these layers as kernels see them: how far a
state fades, the length that a delta net's queries and keys are brought to. In float32."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

LENGTH_EPS = tl.constexpr(1e-6)
"""Of the length that queries and keys are divided by: its makers' own."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """A constant of kernels. A token is projected to queries, keys and values, which are convolved, then to what the
    gated norm opens by, to what is written, and to how far states fade."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool
    """Which key head serves a value head: all in turn, or each several in order."""

    @property
    def scale(self) -> float:
        """Of queries."""
        return self.key_dim**-0.5

    @property
    def keys_at(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values_at(self) -> int:
        return 2 * self.keys_at

    @property
    def gates_at(self) -> int:
        """Where the convolution's inputs end."""
        return self.values_at + self.value_heads * self.value_dim

    @property
    def betas_at(self) -> int:
        return self.gates_at + self.value_heads * self.value_dim

    @property
    def fadings_at(self) -> int:
        return self.betas_at + self.value_heads


@dataclass(frozen=True, slots=True)
class MambaShape:
    """A constant of kernels. A token is projected to its heads' numbers, what they are written along and what is read
    along, which are convolved, then to what the norm opens by, and to the lengths of its heads' steps."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    shortest_step: float
    longest_step: float

    @property
    def group_heads(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def group_width(self) -> int:
        return self.num_groups * self.state_size

    @property
    def into_at(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def gates_at(self) -> int:
        """Where the convolution's inputs end."""
        return self.into_at + 2 * self.group_width

    @property
    def lengths_at(self) -> int:
        return self.gates_at + self.num_heads * self.head_dim


@triton.jit
def product(left, right, PRECISION: tl.constexpr):
    """In float32. The interpreter cannot multiply 16-bit matrices, and is told by its precision."""
    if PRECISION == "ieee":
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def key_head_of(head, SHAPE: tl.constexpr):
    if SHAPE.tiled:
        return head % SHAPE.key_heads
    else:
        return head // (SHAPE.value_heads // SHAPE.key_heads)


@triton.jit
def fading_of(x, dt_bias, decay, head):
    """The logarithm of what is left of a state, below 0; x: what a token is projected to, of its heads"""
    return tl.load(decay + head) * softplus(x + tl.load(dt_bias + head))
