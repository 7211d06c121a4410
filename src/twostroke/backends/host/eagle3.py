"""The arithmetic of an EAGLE-3 head in numpy, float32: what faster code is held against.

Slot p of its keys and values is made from token p and the target's hidden state at p - 1, so slot 0 says nothing. What
a slot holds depends on nothing else: one that another stream wrote for the same text serves as well."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from twostroke.backends.host.arithmetic import Array, gelu_tanh, linear, rms_norm, rotate, silu, softmax
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec

Ints = npt.NDArray[np.int32]
Embed = Callable[[Ints], Array]
FIRST_SLOT = 1


class Eagle3Network:
    """`embed` gives rows of the target's embedding, and `output` its output matrix, for a head that shares them."""

    def __init__(
        self,
        head: Eagle3Head,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int,
        embed: Embed,
        output: Callable[[], Array],
    ) -> None:
        spec = head.spec
        self.spec: Eagle3Spec = spec
        weights = {name: tensor.to_float32() for name, tensor in head.tensors.items()}
        self._embed: Embed = weights["embedding"].__getitem__ if "embedding" in weights else embed
        self._output = weights["output"] if "output" in weights else output()
        self._weights = weights
        attention = self._attention = spec.layer.grouped
        self._activate = silu if spec.layer.present_mlp.activation == "silu" else gelu_tanh
        self._window = attention.window
        self._frequencies = np.array(attention.rope.inverse_frequencies(max_context))
        self._block_size = block_size
        shape = (num_blocks * block_size, attention.num_kv_heads, attention.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def join(self, taps: Array) -> Array:
        """From the target's hidden states, side by side [n, taps * target hidden], to the head's [n, hidden]."""
        spec, weights = self.spec, self._weights
        if spec.norm_before_fc:
            taps = rms_norm(taps, weights["input_norm"], spec.norm_eps)
        if spec.fc_norm:
            parts = np.split(taps, len(spec.taps), axis=1)
            norms = [weights[f"fc_norm.{index}"] for index in range(len(parts))]
            taps = np.concatenate(
                [rms_norm(part, norm, spec.norm_eps) for part, norm in zip(parts, norms, strict=True)], 1
            )
        return linear(taps, weights["fc"])

    def blank(self, blocks: Ints) -> bool:
        return False  # a step is told where to begin

    def write(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints) -> None:
        """Fill slots, and guess nothing: token p with the joined hidden state of p - 1 goes to slot p.
        token_ids, positions [n]; hidden [n, hidden]; tables [n, blocks]."""
        self._store(self._inputs(token_ids, hidden)[0], positions, tables)

    def step(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints, firsts: Ints) -> tuple[Array, Array]:
        """The same, and what follows: the hidden state that stands for the target's at p, and the scores of the
        head's tokens at p + 1  # [n, hidden], [n, draft vocab]. firsts [n]: slots before these are not looked at."""
        spec, weights, attention = self.spec, self._weights, self._attention
        inputs, residual = self._inputs(token_ids, hidden)
        self._store(inputs, positions, tables)
        queries = self._heads(inputs, "q", positions)
        mixed = np.stack([self._attend(*one) for one in zip(queries, positions, tables, firsts, strict=True)])
        hidden = residual + linear(
            mixed.reshape(len(mixed), attention.query_width), weights["o"], weights.get("o_bias")
        )
        normed = rms_norm(hidden, weights["mlp_norm"], spec.norm_eps)
        gated = self._activate(linear(normed, weights["gate"])) * linear(normed, weights["up"])
        hidden = hidden + linear(gated, weights["down"])
        normed = rms_norm(hidden, weights["final_norm"], spec.norm_eps)
        return (normed if spec.norm_output else hidden), linear(normed, self._output)

    def _inputs(self, token_ids: Ints, hidden: Array) -> tuple[Array, Array]:
        """What attention reads [n, 2 * hidden], and the residual that its output joins [n, hidden]."""
        spec, weights = self.spec, self._weights
        normed = rms_norm(hidden, weights["hidden_norm"], spec.norm_eps)
        embedded = rms_norm(self._embed(token_ids), weights["embedding_norm"], spec.norm_eps)
        return np.concatenate([embedded, normed], axis=1), normed if spec.norm_before_residual else hidden

    def _heads(self, inputs: Array, name: str, positions: Ints) -> Array:
        """Queries or keys, normed and rotated  # [n, heads, head_dim]"""
        weights = self._weights
        made = linear(inputs, weights[name], weights.get(f"{name}_bias")).reshape(
            len(inputs), -1, self._attention.head_dim
        )
        if f"{name}_norm" in weights:
            made = rms_norm(made, weights[f"{name}_norm"], self.spec.norm_eps)
        angles = positions[:, None].astype(np.float64) * self._frequencies
        factor = self._attention.rope.attention_factor
        cos, sin = (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
        return rotate(made, cos, sin)

    def _store(self, inputs: Array, positions: Ints, tables: Ints) -> None:
        weights, size = self._weights, self._block_size
        blocks = tables[np.arange(len(positions)), positions // size]
        if (blocks < 0).any():
            raise IndexError("a head writes a position whose KV block was never granted")
        slots = blocks.astype(np.intp) * size + positions % size
        self._keys[slots] = self._heads(inputs, "k", positions)
        values = linear(inputs, weights["v"], weights.get("v_bias"))
        self._values[slots] = values.reshape(len(values), -1, self._attention.head_dim)

    def _attend(self, query: Array, position: int, table: Ints, first: int) -> Array:
        """query [heads, head_dim] of one token -> [kv_heads, queries, head_dim]"""
        attention, size = self._attention, self._block_size
        if self._window is not None:
            first = max(first, position - self._window + 1)
        places = np.arange(min(first, position), position + 1)  # it sees itself always
        slots = table[places // size].astype(np.intp) * size + places % size
        grouped = query.reshape(attention.num_kv_heads, attention.queries_per_kv_head, attention.head_dim)
        scores = grouped @ self._keys[slots].transpose(1, 2, 0) * np.float32(attention.scale)
        mixed: Array = softmax(scores) @ self._values[slots].transpose(1, 0, 2)
        return mixed
