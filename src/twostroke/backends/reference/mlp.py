"""The gated MLP, and the mixture of experts that some models have in its place. Both take normed hidden states."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, gelu, gelu_tanh, linear, sigmoid, silu
from twostroke.backends.host.routing import route
from twostroke.backends.reference.weights import ExpertWeights, GatedMlp, PlainMlp
from twostroke.models.spec import ClampedGate, DenseMlp, MoeSpec


def gated_mlp(mlp: DenseMlp, weights: GatedMlp, x: Array) -> Array:
    """One projection decides how much of the other passes  # [num_tokens, hidden]"""
    gate = linear(x, weights.gate, weights.gate_bias)  # [num_tokens, intermediate]
    up = linear(x, weights.up, weights.up_bias)
    return linear(_gated(mlp, gate, up), weights.down, weights.down_bias)


def plain_mlp(mlp: DenseMlp, weights: PlainMlp, x: Array) -> Array:
    """[num_tokens, hidden]"""
    return linear(_activate(mlp, linear(x, weights.up, weights.up_bias)), weights.down, weights.down_bias)


def _activate(mlp: DenseMlp, x: Array) -> Array:
    if mlp.activation == "silu":
        return silu(x)
    return gelu(x) if mlp.is_exact else gelu_tanh(x)


def _gated(mlp: DenseMlp, gate: Array, up: Array) -> Array:
    if mlp.clamp is not None:
        return _clamped(mlp.clamp, gate, up)
    return _activate(mlp, gate) * up


def _clamped(clamp: ClampedGate, gate: Array, up: Array) -> Array:
    limit = np.float32(clamp.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(np.float32(clamp.alpha) * gate) * (up + 1)


def mixture_of_experts(moe: MoeSpec, weights: ExpertWeights, x: Array) -> Array:
    """Each token goes through the few experts its router likes best; their outputs are summed by the router's shares.
    Every expert takes all of its tokens at once; what other ranks hold, they add  # [num_tokens, hidden]"""
    chosen, shares = route(moe, linear(x, weights.router, weights.router_bias), weights.router_correction)
    output = np.zeros_like(x)
    for expert in np.unique(chosen).tolist():
        if expert not in weights.experts:
            continue
        tokens, places = np.nonzero(chosen == expert)
        output[tokens] += shares[tokens, places, None] * gated_mlp(moe.expert, weights.experts[expert], x[tokens])
    if moe.shared is not None and weights.shared is not None:
        met_by_all = gated_mlp(moe.shared, weights.shared, x)
        if weights.shared_router is not None:
            met_by_all = sigmoid(linear(x, weights.shared_router)) * met_by_all
        output += met_by_all
    return output
