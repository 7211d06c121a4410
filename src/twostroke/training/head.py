"""An EAGLE-3 head in torch, as it is trained: every position of a text drafts several tokens at once, each step reading
the hidden states of the step before, as it will when nobody knows the truth yet ("training-time test")."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from twostroke.models.heads.eagle3 import Eagle3Head, Eagle3Spec
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import DenseMlp, GroupedAttention, LayerSpec, ModelSpec
from twostroke.training.arithmetic import attend, in_heads, rms_norm, rotate, rotation
from twostroke.training.target import Target

_SPREAD = 0.02
_HEAD_DIM, _QUERIES_A_KEY, _THETA = 64, 4, 10_000.0
"""Of a head whose target has no attention that it could be like."""
_WIDTH_UNIT = 32
"""Tiles of the CPU's matrices are that long."""


def head_spec(target: ModelSpec, taps: tuple[int, ...], draft_vocab_size: int) -> Eagle3Spec:
    """A head as wide as its target, with the heads of its attention and the width of its MLP. Hidden states are normed
    before they are its residual: a target's are so large in some places that a young layer adds nothing to them."""
    return Eagle3Spec(
        layer=LayerSpec(_attention(target), DenseMlp(_width(target))),
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        taps=taps,
        norm_eps=target.norm_eps,
        max_context=target.max_context,
        norm_before_residual=True,
    )


def _attention(target: ModelSpec) -> GroupedAttention:
    """That of the first layer with keys and values. A target with latents has more and larger heads than one layer
    needs, and one may have none at all."""
    found = [layer.attention for layer in target.layers if isinstance(layer.attention, GroupedAttention)]
    if not found:
        num_kv_heads = max(1, target.hidden_size // (_HEAD_DIM * _QUERIES_A_KEY))
        rope = RopeSpec(_THETA, _HEAD_DIM)
        return GroupedAttention(num_kv_heads * _QUERIES_A_KEY, num_kv_heads, _HEAD_DIM, rope)
    own, turned = found[0], [one.rope for one in found if one.rope.dim > 0]
    # A rotation that is stretched for long contexts is the target's; a head looks back well enough without.
    rope = RopeSpec(turned[0].theta if turned else _THETA, own.head_dim)
    return GroupedAttention(own.num_heads, own.num_kv_heads, own.head_dim, rope)


def _width(target: ModelSpec) -> int:
    """Of its widest MLP, or of all experts that a token meets."""
    experts = target.moe
    met = 0 if experts is None else experts.experts_per_token * experts.expert_intermediate_size
    width = max(target.dense_width, met)
    return -(-width // _WIDTH_UNIT) * _WIDTH_UNIT


def fresh_weights(spec: Eagle3Spec, target: Target, target_ids: Tensor, seed: int) -> dict[str, Tensor]:
    """Where the target has something of the kind (its output, its last norm), training begins with that; the rest is
    drawn, or does nothing yet."""
    made = torch.Generator().manual_seed(seed)
    shapes = spec.tensor_shapes() | {"output": (spec.draft_vocab_size, spec.hidden_size)}
    weights = {}
    for name, shape in shapes.items():
        one = torch.randn(shape, generator=made) * _SPREAD if len(shape) > 1 else torch.ones(shape)
        weights[name] = one.to(target.device)
    identity = torch.eye(spec.hidden_size, device=target.device)
    # Hidden states are large, and what is drawn must not drown them.
    weights["fc"] = _SPREAD * weights["fc"] + torch.cat([identity / len(spec.taps)] * len(spec.taps), dim=1)
    weights["output"] = target.output[target_ids].clone()
    weights["final_norm"] = target.final_norm.clone()
    return weights


def stored_head(stored: Eagle3Head, target: Target) -> Head:
    """One that this package wrote."""
    weights = {name: torch.from_numpy(one.to_float32()).to(target.device) for name, one in stored.tensors.items()}
    return Head(stored.spec, weights, target.embedding, torch.from_numpy(stored.target_ids).to(target.device))


@dataclass(slots=True)
class _Past:
    """Keys and values of the steps so far, [texts, heads, n, head_dim] each: those of the first are read by all later
    positions, of others by their own alone."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class Head:
    def __init__(self, spec: Eagle3Spec, weights: Mapping[str, Tensor], embedding: Tensor, target_ids: Tensor) -> None:
        """`embedding` is the target's, which is not trained; target_ids [draft vocab]."""
        self.spec, self.weights, self.target_ids = spec, dict(weights), target_ids
        self._embedding = embedding

    def unroll(self, token_ids: Tensor, taps: Tensor, num_steps: int) -> Iterator[Tensor]:
        """token_ids [texts, n] and the target's hidden states of all but the last [texts, n - 1, taps * hidden]. Row i
        of step j is what the scores of token i + j + 2 are made from, with what is known when the target has read i,
        and token i + 1 was drawn  # num_steps of [texts, n - 1, hidden]. Tokens in between are the text's."""
        past, hidden, count = _Past(), linear(taps, self.weights["fc"]), token_ids.shape[1] - 1
        for step in range(num_steps):
            # Behind the text's end nothing is taught, so what stands there does not matter.
            tokens = torch.nn.functional.pad(token_ids[:, step + 1 :], (0, step))[:, :count]
            hidden = self._step(tokens, hidden, step, past)
            yield hidden

    def drafts(self, token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
        """The same where tokens in between are the head's own best: the target's tokens that it drafts
        # [texts, n - 1, num_steps]"""
        past, hidden, found = _Past(), linear(taps, self.weights["fc"]), [token_ids[:, 1:]]
        for step in range(num_steps):
            hidden = self._step(found[-1], hidden, step, past)
            found.append(self.target_ids[self.scores(hidden).argmax(dim=-1)])
        return torch.stack(found[1:], dim=-1)

    def scores(self, hidden: Tensor) -> Tensor:
        """Of some rows that `unroll` gave  # [..., draft vocab]"""
        return linear(rms_norm(hidden, self.weights["final_norm"], self.spec.norm_eps), self.weights["output"])

    def _step(self, tokens: Tensor, hidden: Tensor, step: int, past: _Past) -> Tensor:
        weights, spec, own = self.weights, self.spec, self.spec.layer.grouped
        eps, count = spec.norm_eps, hidden.shape[1]
        embedded = rms_norm(self._embedding[tokens], weights["embedding_norm"], eps)
        hidden = rms_norm(hidden, weights["hidden_norm"], eps)  # `norm_before_residual`
        inputs = torch.cat([embedded, hidden], dim=-1)
        made = {name: in_heads(linear(inputs, weights[name]), own.head_dim) for name in "qkv"}
        cos, sin = rotation(own.rope, torch.arange(step, step + count), spec.max_context, hidden.device)
        queries = rotate(made["q"], cos, sin)
        past.keys.append(rotate(made["k"], cos, sin))
        past.values.append(made["v"])
        hidden = hidden + linear(_attend_past(own, queries, past), weights["o"])
        normed = rms_norm(hidden, weights["mlp_norm"], eps)
        return hidden + linear(silu(linear(normed, weights["gate"])) * linear(normed, weights["up"]), weights["down"])

    def arrays(self) -> dict[str, npt.NDArray[np.float32]]:
        return {name: weight.detach().float().cpu().numpy() for name, weight in self.weights.items()}


def _attend_past(own: GroupedAttention, queries: Tensor, past: _Past) -> Tensor:
    """Position i reads the first step's keys up to i, and of each later step that of i
    # [texts, n, heads * head_dim]"""
    if len(past.keys) == 1:
        return attend(own, queries, past.keys[0], past.values[0])
    count, spread = queries.shape[2], own.queries_per_kv_head
    keys = [one.repeat_interleave(spread, dim=1) for one in past.keys]
    values = [one.repeat_interleave(spread, dim=1) for one in past.values]
    future = torch.ones(count, count, dtype=torch.bool, device=queries.device).triu(1)
    scores = [(queries @ keys[0].transpose(2, 3)).masked_fill(future, float("-inf"))]
    scores += [(one * queries).sum(dim=-1, keepdim=True) for one in keys[1:]]
    shares = (torch.cat(scores, dim=-1) * own.scale).softmax(dim=-1).to(values[0].dtype)
    mixed = shares[..., :count] @ values[0]
    for index, one in enumerate(values[1:]):
        mixed = mixed + shares[..., count + index, None] * one
    return mixed.transpose(1, 2).flatten(2)
