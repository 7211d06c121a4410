"""The arithmetic of an EAGLE-3 head in numpy, float32: what faster code is held against.

Slot p of its keys and values is made from token p and the target's hidden state at p - 1, so slot 0 says nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from twostroke.backends.host.arithmetic import Array, gelu_tanh, linear, rms_norm, silu
from twostroke.backends.host.draft_blocks import ArrayBlocks
from twostroke.backends.host.paged_layer import Ints, PagedLayer
from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec

Embed = Callable[[Ints], Array]


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
        self._activate = silu if spec.layer.present_mlp.activation == "silu" else gelu_tanh
        self._layer = PagedLayer(
            spec.layer.grouped,
            weights,
            spec.norm_eps,
            num_blocks=num_blocks,
            block_size=block_size,
            max_context=max_context,
        )

    @property
    def kv(self) -> ArrayBlocks:
        return self._layer.blocks

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
        self._layer.store(self._inputs(token_ids, hidden)[0], positions, tables)

    def step(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints, firsts: Ints) -> tuple[Array, Array]:
        """The same, and what follows: the hidden state that stands for the target's at p, and the scores of the
        head's tokens at p + 1  # [n, hidden], [n, draft vocab]. firsts [n]: slots before these are not looked at."""
        spec, weights = self.spec, self._weights
        inputs, residual = self._inputs(token_ids, hidden)
        self._layer.store(inputs, positions, tables)
        mixed = self._layer.attend(inputs, positions, tables, firsts)
        hidden = residual + linear(mixed, weights["o"], weights.get("o_bias"))
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
