"""The gated MLP, and the mixture of experts that some models have in its place. Both take normed hidden states."""

from __future__ import annotations

import numpy as np

from twostroke.backends.host.arithmetic import Array, gelu, gelu_tanh, linear, rms_norm, sigmoid, silu
from twostroke.backends.host.routing import route
from twostroke.backends.interface import Join
from twostroke.backends.reference.weights import ExpertWeights, GatedMlp
from twostroke.models.spec import ClampedGate, DenseMlp, MoeSpec


def gated_mlp(mlp: DenseMlp, weights: GatedMlp, x: Array) -> Array:
    """One projection decides how much of the other passes; without a gate, it decides for itself
    # [num_tokens, hidden]"""
    inner = linear(x, weights.up, weights.up_bias)  # [num_tokens, intermediate]
    if weights.gate is None:
        inner = _activated(mlp, inner)
    else:
        gate = linear(x, weights.gate, weights.gate_bias)
        inner = _clamped(mlp.clamp, gate, inner) if mlp.clamp is not None else _activated(mlp, gate) * inner
    return linear(inner, weights.down, weights.down_bias)


def _activated(mlp: DenseMlp, x: Array) -> Array:
    if mlp.squared_relu:
        return np.square(np.maximum(x, 0))
    if mlp.activation == "silu":
        return silu(x)
    return gelu(x) if mlp.is_exact else gelu_tanh(x)


def _clamped(clamp: ClampedGate, gate: Array, up: Array) -> Array:
    limit = np.float32(clamp.limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(np.float32(clamp.alpha) * gate) * (up + 1)


def mixture_of_experts(moe: MoeSpec, weights: ExpertWeights, x: Array) -> Array:
    """Each token goes through the few experts its router likes best, and through the MLP that every token meets, where
    there is one  # [num_tokens, hidden]"""
    output = _routed(moe, weights, x, x)
    if moe.shared is not None and weights.shared is not None:
        met_by_all = gated_mlp(moe.shared, weights.shared, x)
        if weights.shared_router is not None:
            met_by_all = sigmoid(linear(x, weights.shared_router)) * met_by_all
        output += met_by_all
    return output


def experts_beside(
    moe: MoeSpec, weights: ExpertWeights, hidden: Array, normed: Array, eps: float, join: Join | None
) -> Array:
    """Gemma 4: the MLP reads what the layer's norm gave, the router and its experts the residual stream through norms
    of their own. Ranks join each part before it is normed  # [num_tokens, hidden]"""
    router_norm, experts_norm = weights.router_norm, weights.experts_norm
    after_experts, after_shared = weights.post_experts_norm, weights.post_shared_norm
    assert router_norm is not None and experts_norm is not None and moe.shared is not None
    assert after_experts is not None and after_shared is not None and weights.shared is not None
    for_router = rms_norm(hidden, router_norm, eps) * np.float32(hidden.shape[-1] ** -0.5)
    routed = _routed(moe, weights, for_router, rms_norm(hidden, experts_norm, eps))
    met_by_all = gated_mlp(moe.shared, weights.shared, normed)
    if join is not None:
        join(routed)
        join(met_by_all)
    return rms_norm(met_by_all, after_shared, eps) + rms_norm(routed, after_experts, eps)


def _routed(moe: MoeSpec, weights: ExpertWeights, for_router: Array, x: Array) -> Array:
    """Outputs of a token's experts, summed by the router's shares. Every expert takes all of its tokens at once; what
    other ranks hold, they add  # [num_tokens, hidden]"""
    logits = linear(for_router, weights.router, weights.router_bias)
    chosen, shares = route(moe, logits, weights.router_correction)
    if weights.expert_scale is not None:
        shares = shares * weights.expert_scale[chosen]
    if weights.latent_down is not None:
        x = linear(x, weights.latent_down)
    output = np.zeros_like(x)
    for expert in np.unique(chosen).tolist():
        if expert not in weights.experts:
            continue
        tokens, places = np.nonzero(chosen == expert)
        output[tokens] += shares[tokens, places, None] * gated_mlp(moe.expert, weights.experts[expert], x[tokens])
    return output if weights.latent_up is None else linear(output, weights.latent_up)
