"""Attention of a head's one layer in numpy, float32, over slots in blocks: slot p holds the key and value of token p,
and slot 0 says nothing. What a slot holds depends on its own text alone: one that another stream wrote serves as
well."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, linear, rms_norm, rotate, softmax
from twostroke.models.spec import GroupedAttention

Ints = npt.NDArray[np.int32]
FIRST_SLOT = 1


class PagedLayer:
    def __init__(
        self,
        attention: GroupedAttention,
        weights: Mapping[str, Array],
        norm_eps: float,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int,
    ) -> None:
        """`weights`: q, k and v, with their biases and norms where there are some."""
        self._attention, self._weights, self._norm_eps = attention, weights, norm_eps
        self._frequencies = np.array(attention.rope.inverse_frequencies(max_context))
        self._block_size = block_size
        shape = (num_blocks * block_size, attention.num_kv_heads, attention.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def store(self, inputs: Array, positions: Ints, tables: Ints) -> None:
        """Fill the slots of these tokens. inputs [n, width], positions [n], tables [n, blocks]"""
        weights, size = self._weights, self._block_size
        blocks = tables[np.arange(len(positions)), positions // size]
        if (blocks < 0).any():
            raise IndexError("a head writes a position whose KV block was never granted")
        slots = blocks.astype(np.intp) * size + positions % size
        self._keys[slots] = self._heads(inputs, "k", positions)
        values = linear(inputs, weights["v"], weights.get("v_bias"))
        self._values[slots] = values.reshape(len(values), -1, self._attention.head_dim)

    def attend(self, inputs: Array, positions: Ints, tables: Ints, firsts: Ints) -> Array:
        """What each token finds in its own and earlier slots. firsts [n]: slots before these are not looked at
        # [n, heads * head_dim]"""
        queries = self._heads(inputs, "q", positions)
        mixed = np.stack([self._attend(*one) for one in zip(queries, positions, tables, firsts, strict=True)])
        return mixed.reshape(len(mixed), self._attention.query_width)

    def _heads(self, inputs: Array, name: str, positions: Ints) -> Array:
        """Queries or keys, normed and rotated  # [n, heads, head_dim]"""
        weights = self._weights
        made = linear(inputs, weights[name], weights.get(f"{name}_bias")).reshape(
            len(inputs), -1, self._attention.head_dim
        )
        if f"{name}_norm" in weights:
            made = rms_norm(made, weights[f"{name}_norm"], self._norm_eps)
        angles = positions[:, None].astype(np.float64) * self._frequencies
        factor = self._attention.rope.attention_factor
        cos, sin = (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
        return rotate(made, cos, sin)

    def _attend(self, query: Array, position: int, table: Ints, first: int) -> Array:
        """query [heads, head_dim] of one token -> [kv_heads, queries, head_dim]"""
        attention, size = self._attention, self._block_size
        if attention.window is not None:
            first = max(first, position - attention.window + 1)
        places = np.arange(min(first, position), position + 1)  # it sees itself always
        slots = table[places // size].astype(np.intp) * size + places % size
        grouped = query.reshape(attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim)
        scores = grouped @ self._keys[slots].transpose(1, 2, 0) * np.float32(attention.scale)
        mixed: Array = softmax(scores) @ self._values[slots].transpose(1, 0, 2)
        return mixed
