"""The whole forward pass of a decoder, for every family: embed, then a stack of layers that each add what attention
and the MLP found to the residual stream, then a norm and the logits.

Tokens of all sequences are stacked in one array [num_tokens, ...]: everything but attention treats them alike, and
attention is called once per phase on its own range (decode tokens come first)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from twostroke.backends.host.arithmetic import Array, gelu_tanh, linear, rms_norm, rotate, silu, soft_cap
from twostroke.backends.host.batch import Batch
from twostroke.backends.reference.decode import attend_decode
from twostroke.backends.reference.kv_store import KVStore, Slots
from twostroke.backends.reference.mlp import gated_mlp, mixture_of_experts
from twostroke.backends.reference.prefill import attend_prefill
from twostroke.backends.reference.weights import LayerWeights, Weights
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import GroupedAttention, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every layer needs and no layer changes: prepared once a step."""

    slots: list[Slots]  # a KV group each, [num_tokens]: where new keys and values are written
    rotations: dict[RopeSpec, tuple[Array, Array]]  # cos and sin, each [num_tokens, rope dim / 2]


def residuals(spec: ModelSpec, weights: Weights, batch: Batch, kv: KVStore, max_context: int) -> Iterator[Array]:
    """Compute every token of the batch and write its keys and values; after each layer, give the residual stream
    # [num_tokens, hidden]"""
    plan = StepPlan(kv.slots(batch), _rotations(spec, batch, max_context))
    hidden = weights.embedding[batch.token_ids] * np.float32(spec.embedding_scale)  # [num_tokens, hidden]
    for layer, layer_weights in enumerate(weights.layers):
        hidden = hidden + _attention_block(spec, layer, layer_weights, hidden, batch, kv, plan)
        hidden = hidden + _mlp_block(spec, spec.layers[layer], layer_weights, hidden)
        yield hidden


def logits(spec: ModelSpec, weights: Weights, last: Array) -> Array:
    """Of rows of the last layer's residual stream. Logits are wide (a number for each token of the vocabulary): they
    are computed only of the rows that are wanted  # [rows, vocab]"""
    normed = rms_norm(last, weights.final_norm, spec.norm_eps)
    return soft_cap(linear(normed, weights.output), spec.logits_softcap)


def _rotations(spec: ModelSpec, batch: Batch, max_context: int) -> dict[RopeSpec, tuple[Array, Array]]:
    """Angles in float64: at position 100,000 a float32 angle is off by a hundredth of a radian."""
    rotations = {}
    for rope in {layer.grouped.rope for layer in spec.layers}:
        angles = batch.positions[:, None].astype(np.float64) * rope.inverse_frequencies(max_context)
        cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
        rotations[rope] = (cos.astype(np.float32), sin.astype(np.float32))
    return rotations


def _attention_block(
    spec: ModelSpec, layer: int, weights: LayerWeights, hidden: Array, batch: Batch, kv: KVStore, plan: StepPlan
) -> Array:
    """What attention adds to the residual stream  # [num_tokens, hidden]"""
    attention = spec.layers[layer].grouped
    normed = rms_norm(hidden, weights.attention_norm, spec.norm_eps)
    queries = _heads(linear(normed, weights.q, weights.q_bias), attention.head_dim)  # [num_tokens, heads, head_dim]
    keys = _heads(linear(normed, weights.k, weights.k_bias), attention.head_dim)  # [num_tokens, kv_heads, head_dim]
    values = _heads(linear(normed, weights.v, weights.v_bias), attention.head_dim)
    if weights.q_norm is not None and weights.k_norm is not None:
        queries = rms_norm(queries, weights.q_norm, spec.norm_eps)
        keys = rms_norm(keys, weights.k_norm, spec.norm_eps)
    # Keys are stored rotated: a position never changes, so it is done once and not at every later read.
    cos, sin = plan.rotations[attention.rope]
    queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
    # Write first, then attend: a token reads its own key, and those of its chunk, from the store like any other.
    kv.write(layer, plan.slots[kv.group_of(layer)], keys, values)
    mixed = _attend(attention, layer, queries, batch, kv)
    output = linear(mixed, weights.o, weights.o_bias)
    if weights.post_attention_norm is not None:
        output = rms_norm(output, weights.post_attention_norm, spec.norm_eps)
    return output


def _attend(attention: GroupedAttention, layer: int, queries: Array, batch: Batch, kv: KVStore) -> Array:
    """Each phase by its own path  # [num_tokens, heads * head_dim]"""
    tables = batch.tables[kv.group_of(layer)]
    decodes = batch.num_decodes
    parts = [attend_decode(attention, kv, layer, queries[:decodes], batch.positions[:decodes], tables[:decodes])]
    for segment in range(decodes, batch.num_segments):
        first, count = int(batch.segment_first[segment]), int(batch.segment_count[segment])
        start = int(batch.segment_start[segment])
        parts.append(attend_prefill(attention, kv, layer, queries[first : first + count], start, tables[segment]))
    return np.concatenate(parts)


def _mlp_block(spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, hidden: Array) -> Array:
    """What the MLP, or the experts in its place, add  # [num_tokens, hidden]"""
    normed = rms_norm(hidden, weights.mlp_norm, spec.norm_eps)
    activate = silu if layer.mlp.activation == "silu" else gelu_tanh
    if layer.moe is not None and weights.router is not None:
        output = mixture_of_experts(layer.moe, weights.router, weights.experts, activate, normed)
    else:
        assert weights.mlp is not None
        output = gated_mlp(weights.mlp, activate, normed)
    if weights.post_mlp_norm is not None:
        output = rms_norm(output, weights.post_mlp_norm, spec.norm_eps)
    return output


def _heads(x: Array, head_dim: int) -> Array:
    """[num_tokens, heads * head_dim] -> [num_tokens, heads, head_dim]"""
    return x.reshape(len(x), -1, head_dim)
