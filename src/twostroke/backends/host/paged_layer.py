"""Attention of a head's one layer in numpy, float32, over slots in blocks: slot p holds what is kept of token p, and
slot 0 says nothing. What a slot holds depends on its own text alone: one that another stream wrote serves as well."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, linear, rms_norm, rotate, softmax
from twostroke.backends.host.draft_blocks import ArrayBlocks
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention, LatentAttention

Ints = npt.NDArray[np.int32]
Slots = npt.NDArray[np.intp]
FIRST_SLOT = 1


class _Places:
    """Where tokens lie, and how far they are turned."""

    def __init__(self, rope: RopeSpec, block_size: int, max_context: int) -> None:
        self._frequencies, self._factor = np.array(rope.inverse_frequencies(max_context)), rope.attention_factor
        self._block_size = block_size

    def slots(self, positions: Ints, tables: Ints) -> Slots:
        """Of tokens that are to be kept: positions [n], tables [n, blocks] -> [n]"""
        size = self._block_size
        blocks = tables[np.arange(len(positions)), positions // size]
        if (blocks < 0).any():
            raise IndexError("a head writes a position whose KV block was never granted")
        return np.asarray(blocks.astype(np.intp) * size + positions % size)

    def seen(self, position: int, table: Ints, first: int) -> Slots:
        """Of what a token finds: its own and those before it, but none before `first`."""
        places = np.arange(min(first, position), position + 1)  # it sees itself always
        return np.asarray(
            table[places // self._block_size].astype(np.intp) * self._block_size + places % self._block_size
        )

    def turns(self, positions: Ints) -> tuple[Array, Array]:
        """Cosines and sines  # [n, d/2] each"""
        angles = positions[:, None].astype(np.float64) * self._frequencies
        return (np.cos(angles) * self._factor).astype(np.float32), (np.sin(angles) * self._factor).astype(np.float32)


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
        self._places = _Places(attention.rope, block_size, max_context)
        shape = (num_blocks * block_size, attention.num_kv_heads, attention.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.blocks = ArrayBlocks((self._keys, self._values), block_size, "keys, values")

    def store(self, inputs: Array, positions: Ints, tables: Ints) -> None:
        """Fill the slots of these tokens. inputs [n, width], positions [n], tables [n, blocks]"""
        weights, slots = self._weights, self._places.slots(positions, tables)
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
        return rotate(made, *self._places.turns(positions))

    def _attend(self, query: Array, position: int, table: Ints, first: int) -> Array:
        """query [heads, head_dim] of one token -> [kv_heads, queries, head_dim]"""
        attention = self._attention
        if attention.window is not None:
            first = max(first, position - attention.window + 1)
        slots = self._places.seen(position, table, first)
        grouped = query.reshape(attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim)
        scores = grouped @ self._keys[slots].transpose(1, 2, 0) * np.float32(attention.scale)
        mixed: Array = softmax(scores) @ self._values[slots].transpose(1, 0, 2)
        return mixed


class PagedLatents:
    """The same with latent attention: a slot holds the one vector that keys and values of all heads are made from, and
    queries are brought into its space."""

    def __init__(
        self,
        attention: LatentAttention,
        weights: Mapping[str, Array],
        *,
        num_blocks: int,
        block_size: int,
        max_context: int,
    ) -> None:
        """`weights`: kv_a, kv_b, and q or q_a and q_b, with their norms."""
        self._attention, self._weights = attention, weights
        self._places = _Places(attention.rope, block_size, max_context)
        self._kept = np.zeros((num_blocks * block_size, attention.kv_values), np.float32)
        self.blocks = ArrayBlocks((self._kept,), block_size, "latent")
        by_head = weights["kv_b"].reshape(attention.num_heads, -1, attention.rank)
        self._key_b, self._value_b = by_head[:, : attention.plain_dim], by_head[:, attention.plain_dim :]

    def store(self, inputs: Array, positions: Ints, tables: Ints) -> None:
        """As `PagedLayer.store`."""
        own, weights = self._attention, self._weights
        kept = linear(inputs, weights["kv_a"])  # [n, rank + rotated]
        latents = rms_norm(kept[:, : own.rank], weights["kv_a_norm"], own.norm_eps)
        rotated = self._turned(kept[:, None, own.rank :], positions)[:, 0]  # one for all heads
        self._kept[self._places.slots(positions, tables)] = np.concatenate([latents, rotated], axis=1)

    def attend(self, inputs: Array, positions: Ints, tables: Ints, firsts: Ints) -> Array:
        """As `PagedLayer.attend`  # [n, heads * value_dim]"""
        own = self._attention
        queries = self._queries(inputs).reshape(len(inputs), own.num_heads, own.key_dim)
        plain, rotated = queries[..., : own.plain_dim], self._turned(queries[..., own.plain_dim :], positions)
        mixed = [self._attend(*one) for one in zip(plain, rotated, positions, tables, firsts, strict=True)]
        return np.stack(mixed).reshape(len(inputs), own.num_heads * own.value_dim)

    def _queries(self, inputs: Array) -> Array:
        weights = self._weights
        if "q" in weights:
            return linear(inputs, weights["q"])
        low = rms_norm(linear(inputs, weights["q_a"]), weights["q_a_norm"], self._attention.norm_eps)
        return linear(low, weights["q_b"])

    def _turned(self, x: Array, positions: Ints) -> Array:
        return rotate(x, *self._places.turns(positions), neighbours=self._attention.rope.pairs_neighbours)

    def _attend(self, plain: Array, rotated: Array, position: int, table: Ints, first: int) -> Array:
        """Of one token, each head's query in two parts -> [heads, value_dim]"""
        rank = self._attention.rank
        kept = self._kept[self._places.seen(position, table, first)]  # [context, rank + rotated]
        absorbed = (plain[:, None] @ self._key_b)[:, 0]  # [heads, rank]
        scores = (absorbed @ kept[:, :rank].T + rotated @ kept[:, rank:].T) * np.float32(self._attention.scale)
        mixed = softmax(scores) @ kept[:, :rank]
        return np.asarray((self._value_b @ mixed[:, :, None])[:, :, 0])
