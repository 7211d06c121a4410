"""An EAGLE-3 head in torch, as it is trained: every position of a text drafts several tokens at once, each step reading
the hidden states of the step before, as it will when nobody knows the truth yet ("training-time test")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from twostroke.models.heads.eagle3 import Eagle3Spec
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, ModelSpec
from twostroke.training.target import Target, rms_norm, rotate, rotation, scores_of

_SPREAD = 0.02


def head_spec(target: ModelSpec, taps: tuple[int, ...], draft_vocab_size: int) -> Eagle3Spec:
    """A head as wide as its target, with the heads of its attention and the width of its MLP."""
    own = target.layers[0].grouped
    # A rotation that is stretched for long contexts is the target's; a head looks back well enough without.
    rope = RopeSpec(own.rope.theta, own.head_dim)
    attention = GroupedAttention(own.num_heads, own.num_kv_heads, own.head_dim, rope)
    layer = LayerSpec(attention, DenseMlp(target.dense_width))
    return Eagle3Spec(
        layer=layer,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        norm_eps=target.norm_eps,
        max_context=target.max_context,
    )


def fresh_weights(spec: Eagle3Spec, target: Target, target_ids: Tensor, seed: int) -> dict[str, Tensor]:
    """Where the target has something of the kind (its output, its last norm), training begins with that; the rest is
    drawn, or does nothing yet."""
    made = torch.Generator().manual_seed(seed)
    shapes = spec.tensor_shapes() | {"output": (spec.draft_vocab_size, spec.hidden_size)}
    weights = {}
    for name, shape in shapes.items():
        one = torch.randn(shape, generator=made) * _SPREAD if len(shape) > 1 else torch.ones(shape)
        weights[name] = one.to(target.embedding.device)
    identity = torch.eye(spec.hidden_size, device=target.embedding.device)
    weights["fc"] += torch.cat([identity / len(spec.taps)] * len(spec.taps), dim=1)
    weights["output"] = target.output[target_ids].clone()
    weights["final_norm"] = target.tensors["final_norm"].clone()
    return weights


@dataclass(slots=True)
class _Past:
    """Keys and values of the steps so far: those of the first are read by all later positions, of others by their own
    alone."""

    keys: list[Tensor]
    values: list[Tensor]


class Head:
    def __init__(self, spec: Eagle3Spec, weights: Mapping[str, Tensor], embedding: Tensor, target_ids: Tensor) -> None:
        """`embedding` is the target's, which is not trained; target_ids [draft vocab]."""
        self.spec, self.weights, self.target_ids = spec, dict(weights), target_ids
        self._embedding = embedding

    def unroll(self, token_ids: Tensor, taps: Tensor, num_steps: int, *, truth: bool) -> list[Tensor]:
        """token_ids [n] and the target's hidden states of them [n, taps * hidden]. Position i of step j holds the
        scores of token i + j + 2, from what is known when the target has read i, and token i + 1 was drawn
        # num_steps of [n - 1, draft vocab]. `truth`: tokens in between are the text's; else the head's own best."""
        weights, count = self.weights, len(token_ids) - 1
        hidden = linear(taps[:-1], weights["fc"])
        past, found, tokens = _Past([], []), [], token_ids[1:]
        for step in range(num_steps):
            hidden, scores = self._step(self._embedding[tokens], hidden, step, past)
            found.append(scores)
            if truth:  # behind the text's end nothing is taught, so what stands there does not matter
                later = token_ids[step + 2 :]
                tokens = torch.cat([later, later.new_zeros(count - len(later))])
            else:
                tokens = self.target_ids[scores.argmax(dim=-1)]
        return found

    def _step(self, embedded: Tensor, hidden: Tensor, step: int, past: _Past) -> tuple[Tensor, Tensor]:
        weights, spec, own = self.weights, self.spec, self.spec.layer.grouped
        eps, count = spec.norm_eps, len(hidden)
        normed = rms_norm(hidden, weights["hidden_norm"], eps)
        inputs = torch.cat([rms_norm(embedded, weights["embedding_norm"], eps), normed], dim=-1)
        made = {name: linear(inputs, weights[name]).view(count, -1, own.head_dim) for name in "qkv"}
        places = torch.arange(step, step + count)
        cos, sin = rotation(own.rope, places, spec.max_context, hidden.device)
        past.keys.append(rotate(made["k"], cos, sin))
        past.values.append(made["v"])
        hidden = hidden + linear(_attend_past(own, rotate(made["q"], cos, sin), past), weights["o"])
        normed = rms_norm(hidden, weights["mlp_norm"], eps)
        hidden = hidden + linear(silu(linear(normed, weights["gate"])) * linear(normed, weights["up"]), weights["down"])
        return hidden, linear(rms_norm(hidden, weights["final_norm"], eps), weights["output"])

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: weight.detach().float().cpu().numpy() for name, weight in self.weights.items()}


def _attend_past(own: GroupedAttention, queries: Tensor, past: _Past) -> Tensor:
    """Position i reads the first step's keys up to i, and of each later step that of i  # [n, heads * head_dim]"""
    count, spread = len(queries), own.queries_per_kv_head
    causal = torch.ones(count, count, dtype=torch.bool, device=queries.device).tril()
    scores = [scores_of(own, queries, past.keys[0]).masked_fill(~causal, float("-inf"))]
    later = [(keys.repeat_interleave(spread, dim=1) * queries).sum(dim=-1) * own.scale for keys in past.keys[1:]]
    scores += [one.T[:, :, None] for one in later]  # [heads, n, 1] each
    shares = torch.cat(scores, dim=-1).softmax(dim=-1)
    mixed = torch.einsum("hnm,mhd->nhd", shares[..., :count], past.values[0].repeat_interleave(spread, dim=1))
    for index, values in enumerate(past.values[1:]):
        mixed = mixed + shares[..., count + index].T[:, :, None] * values.repeat_interleave(spread, dim=1)
    return mixed.flatten(1)
