"""The arithmetic of a model's own MTP block in numpy, float32. Slot p is made from token p and the model's hidden state
at p - 1, behind its last norm; the block's own state behind its norm stands for the model's as guesses go on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np

from twostroke.backends.host.arithmetic import Array, linear, rms_norm, sigmoid, silu
from twostroke.backends.host.draft_blocks import ArrayBlocks
from twostroke.backends.host.paged_layer import Ints, PagedLatents, PagedLayer
from twostroke.backends.host.routing import route
from twostroke.models.heads.mtp import EXPERTS, MtpHead, MtpSpec, kept_experts
from twostroke.models.spec import LatentAttention, expert_name
from twostroke.models.weights.tensor import WeightTensor

SHARED = "shared."
MATRICES = ("gate", "up", "down")


class MetExperts:
    """Experts stay as they are stored until a token meets one, and those that were met last are kept in float32."""

    def __init__(self, tensors: Mapping[str, WeightTensor], most: int) -> None:
        self._tensors, self._most = tensors, most
        self._met: OrderedDict[int, dict[str, Array]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._met)

    def __getitem__(self, expert: int) -> dict[str, Array]:
        found = self._met.pop(expert, None)
        if found is None:
            if len(self._met) >= self._most:
                self._met.popitem(last=False)
            found = {name: self._tensors[expert_name(expert, name)].to_float32() for name in MATRICES}
        self._met[expert] = found
        return found


class MtpNetwork:
    """`embed` gives rows of the model's embedding; `output` is its output matrix, `target_norm` its last norm."""

    def __init__(
        self,
        head: MtpHead,
        *,
        num_blocks: int,
        block_size: int,
        max_context: int,
        embed: Callable[[Ints], Array],
        output: Array,
        target_norm: Array,
    ) -> None:
        self.spec: MtpSpec = head.spec
        self._weights = {
            name: tensor.to_float32() for name, tensor in head.tensors.items() if not name.startswith(EXPERTS)
        }
        self._experts = MetExperts(head.tensors, kept_experts(head.spec))
        self._embed, self._output, self._target_norm = embed, output, target_norm
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_context": max_context}
        attention = head.spec.layer.attention
        self._layer: PagedLayer | PagedLatents
        if isinstance(attention, LatentAttention):
            self._layer = PagedLatents(attention, self._weights, **sizes)
        else:
            self._layer = PagedLayer(head.spec.layer.grouped, self._weights, head.spec.norm_eps, **sizes)

    @property
    def kv(self) -> ArrayBlocks:
        return self._layer.blocks

    def join(self, taps: Array) -> Array:
        """From what leaves the model's last layer to what the block reads of it  # [n, hidden]"""
        return rms_norm(taps, self._target_norm, self.spec.norm_eps)

    def blank(self, blocks: Ints) -> bool:
        return False  # a step is told where to begin

    def write(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints) -> None:
        """Fill slots, and guess nothing: token p with the hidden state of p - 1 goes to slot p."""
        self._layer.store(self._inputs(token_ids, hidden)[0], positions, tables)

    def step(self, token_ids: Ints, hidden: Array, positions: Ints, tables: Ints, firsts: Ints) -> tuple[Array, Array]:
        """The same, and what follows: the state that stands for the model's at p, and the scores of all tokens at
        p + 1  # [n, hidden], [n, vocab]"""
        weights, eps = self._weights, self.spec.norm_eps
        inputs, residual = self._inputs(token_ids, hidden)
        self._layer.store(inputs, positions, tables)
        mixed = self._layer.attend(inputs, positions, tables, firsts)
        if "q_gate" in weights:
            mixed = mixed * sigmoid(linear(inputs, weights["q_gate"]))
        residual = residual + linear(mixed, weights["o"], weights.get("o_bias"))
        residual = residual + self._mlp(rms_norm(residual, weights["mlp_norm"], eps))
        state = rms_norm(residual, weights["final_norm"], eps)
        return state, linear(state, self._output)

    def _inputs(self, token_ids: Ints, hidden: Array) -> tuple[Array, Array]:
        """What attention reads, and the residual that its output joins  # both [n, hidden]"""
        weights, eps = self._weights, self.spec.norm_eps
        embedded = rms_norm(self._embed(token_ids), weights["embedding_norm"], eps)
        both = np.concatenate([embedded, rms_norm(hidden, weights["hidden_norm"], eps)], axis=1)
        residual = linear(both, weights["fc"])
        return rms_norm(residual, weights["attention_norm"], eps), residual

    def _mlp(self, x: Array) -> Array:
        moe, weights = self.spec.layer.moe, self._weights
        if moe is None:
            return _gated(weights, "", x)
        chosen, shares = route(moe, linear(x, weights["router"]), weights.get("router_correction"))
        output = np.zeros_like(x)
        for expert in np.unique(chosen).tolist():
            tokens, places = np.nonzero(chosen == expert)
            output[tokens] += shares[tokens, places, None] * _gated(self._experts[expert], "", x[tokens])
        if moe.shared is not None:
            met_by_all = _gated(weights, SHARED, x)
            gate = weights.get(f"{SHARED}router")
            output += met_by_all if gate is None else sigmoid(linear(x, gate)) * met_by_all
        return output


def _gated(weights: Mapping[str, Array], prefix: str, x: Array) -> Array:
    gate, up = linear(x, weights[f"{prefix}gate"]), linear(x, weights[f"{prefix}up"])
    return linear(silu(gate) * up, weights[f"{prefix}down"])
