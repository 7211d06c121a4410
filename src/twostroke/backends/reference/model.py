"""The whole forward pass of a decoder, for every family: embed, then a stack of layers that each add what attention
and the MLP found to the residual stream, then a norm and the logits.

Tokens of all sequences are stacked in one array [num_tokens, ...]: everything but attention treats them alike, and
attention is called once per phase on its own range (decode tokens come first)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from twostroke.backends.host.arithmetic import Array, linear, rms_norm, rotate, sigmoid, soft_cap
from twostroke.backends.host.batch import Batch
from twostroke.backends.interface import Join
from twostroke.backends.reference.decode import attend_decode, attend_latent_decode
from twostroke.backends.reference.kv_store import KVStore, Slots, Table
from twostroke.backends.reference.layer_input import input_block, layer_inputs
from twostroke.backends.reference.mlp import experts_beside, gated_mlp, mixture_of_experts
from twostroke.backends.reference.norm_meeting import NormMeeting
from twostroke.backends.reference.prefill import attend_latent_prefill, attend_prefill
from twostroke.backends.reference.recurrent import mix_recurrent
from twostroke.backends.reference.recurrent_weights import RecurrentWeights
from twostroke.backends.reference.weights import (
    ExpertWeights,
    GatedMlp,
    GroupedWeights,
    LatentWeights,
    LayerWeights,
    Weights,
)
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import (
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    QueryGrowth,
    Recurrent,
)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What every layer needs and no layer changes: prepared once a step."""

    slots: list[Slots]  # a KV group each, [num_tokens]: where new keys and values are written
    rotations: dict[RopeSpec, tuple[Array, Array]]  # cos and sin, each [num_tokens, rope dim / 2]

    @classmethod
    def of(cls, spec: ModelSpec, batch: Batch, kv: KVStore, max_context: int) -> StepPlan:
        return cls(kv.slots(batch), _rotations(spec, batch, max_context))


def residuals(
    spec: ModelSpec, weights: Weights, batch: Batch, kv: KVStore, max_context: int, join: Join | None = None
) -> Iterator[Array]:
    """Compute every token of the batch and write its keys and values; after each layer, give the residual stream
    # [num_tokens, hidden]

    `join`: of a rank, which holds some heads and some of each MLP. What it found becomes what all ranks did."""
    kv.states.drop_aside()
    plan = StepPlan.of(spec, batch, kv, max_context)
    hidden = weights.embedding[batch.token_ids] * np.float32(spec.embedding_scale)  # [num_tokens, hidden]
    inputs = layer_inputs(spec, weights.layer_inputs, batch.token_ids, hidden)
    for layer, layer_weights in enumerate(weights.layers):
        if layer_weights.attention is not None:
            hidden = hidden + _attention_block(spec, layer, layer_weights, hidden, batch, kv, plan, join)
        if layer_weights.mlp is not None:
            hidden = hidden + _mlp_block(spec, spec.layers[layer], layer_weights, hidden, join)
        if inputs is not None:
            hidden = hidden + input_block(spec, layer_weights, hidden, inputs[:, layer])
        if layer_weights.layer_scale is not None:
            hidden = hidden * layer_weights.layer_scale
        yield hidden


def logits(spec: ModelSpec, weights: Weights, last: Array) -> Array:
    """Of rows of the last layer's residual stream. Logits are wide (a number for each token of the vocabulary): they
    are computed only of the rows that are wanted  # [rows, vocab]"""
    assert weights.output is not None
    normed = rms_norm(last, weights.final_norm, spec.norm_eps)
    return soft_cap(linear(normed, weights.output), spec.logits_softcap)


def _rotations(spec: ModelSpec, batch: Batch, max_context: int) -> dict[RopeSpec, tuple[Array, Array]]:
    """Angles in float64: at position 100,000 a float32 angle is off by a hundredth of a radian."""
    rotations = {}
    attentions = (layer.attention for layer in spec.layers)
    for rope in {one.rope for one in attentions if isinstance(one, GroupedAttention | LatentAttention)}:
        angles = batch.positions[:, None].astype(np.float64) * rope.inverse_frequencies(max_context)
        cos, sin = np.cos(angles) * rope.attention_factor, np.sin(angles) * rope.attention_factor
        rotations[rope] = (cos.astype(np.float32), sin.astype(np.float32))
    return rotations


def _attention_block(
    spec: ModelSpec,
    layer: int,
    weights: LayerWeights,
    hidden: Array,
    batch: Batch,
    kv: KVStore,
    plan: StepPlan,
    join: Join | None,
) -> Array:
    """What attention adds to the residual stream  # [num_tokens, hidden]"""
    attention, own = spec.layers[layer].attention, weights.attention
    normed = _maybe_normed(hidden, weights.attention_norm, spec.norm_eps)
    if isinstance(attention, Recurrent) and isinstance(own, RecurrentWeights):
        tables = batch.tables[kv.group_of(layer)]
        output = mix_recurrent(attention, own, layer, normed, batch, kv.states, tables, spec.norm_eps, join)
    elif isinstance(attention, LatentAttention) and isinstance(own, LatentWeights):
        output = _latent_attention(attention, own, layer, normed, batch, kv, plan)
    else:
        assert isinstance(attention, GroupedAttention) and isinstance(own, GroupedWeights)
        output = grouped_attention(spec, attention, own, layer, normed, batch, kv, plan, join)
    if join is not None:
        join(output)
    return _maybe_normed(output, weights.post_attention_norm, spec.norm_eps)


def grouped_attention(
    spec: ModelSpec,
    attention: GroupedAttention,
    weights: GroupedWeights,
    layer: int,
    normed: Array,
    batch: Batch,
    kv: KVStore,
    plan: StepPlan,
    join: Join | None = None,
) -> Array:
    """Of hidden states that were normed, if the model norms them before  # [num_tokens, hidden]"""
    width, eps, wide = attention.head_dim, spec.norm_eps, attention.wide_norms
    cos, sin = plan.rotations[attention.rope]
    queries = linear(normed, weights.q, weights.q_bias)
    meeting = None if wide is None or join is None else NormMeeting(join, wide.query_width)
    # [num_tokens, heads, head_dim]
    queries = _normed_and_rotated(attention, queries, weights.q_norm, eps, cos, sin, meeting)
    if attention.growth is not None:
        queries = queries * _growth(attention.growth, batch)[:, None, None]
    if weights.k is not None:
        made = linear(normed, weights.k, weights.k_bias)
        # Keys are stored rotated: a position never changes, so it is done once and not at every later read.
        meeting = None if wide is None or join is None else NormMeeting(join, wide.kv_width, counts=wide.counts_keys)
        # [num_tokens, kv_heads, head_dim]
        keys = _normed_and_rotated(attention, made, weights.k_norm, eps, cos, sin, meeting)
        values = _heads(made if weights.v is None else linear(normed, weights.v, weights.v_bias), width)
        if attention.value_norm:
            values = rms_norm(values, np.ones(width, dtype=np.float32), eps)
        # Write first, then attend: a token reads its own key, and those of its chunk, from the store like any other.
        kv.write(layer, plan.slots[kv.group_of(layer)], keys, values)
    decode = partial(attend_decode, attention, weights.sinks, kv, layer)
    prefill = partial(attend_prefill, attention, weights.sinks, kv, layer)
    mixed = _by_phase(decode, prefill, queries, batch, batch.tables[kv.group_of(layer)])
    if weights.q_gate is not None:
        mixed = mixed * sigmoid(linear(normed, weights.q_gate))
    return linear(mixed, weights.o, weights.o_bias)


def _latent_attention(
    attention: LatentAttention,
    weights: LatentWeights,
    layer: int,
    normed: Array,
    batch: Batch,
    kv: KVStore,
    plan: StepPlan,
) -> Array:
    queries = _heads(_latent_queries(attention, weights, normed), attention.key_dim)  # [num_tokens, heads, key_dim]
    kept = linear(normed, weights.kv_a)  # [num_tokens, rank + rotated]
    latents = rms_norm(kept[:, : attention.rank], weights.kv_a_norm, attention.norm_eps)
    turn = partial(rotate, neighbours=attention.rope.pairs_neighbours)
    cos, sin = plan.rotations[attention.rope]
    turned = turn(queries[..., attention.plain_dim :], cos, sin)
    queries = np.concatenate([queries[..., : attention.plain_dim], turned], axis=-1)
    if attention.growth is not None:
        queries = queries * _growth(attention.growth, batch)[:, None, None]
    rotated = turn(kept[:, None, attention.rank :], cos, sin)[:, 0]  # [num_tokens, rotated]: one for all heads
    kv.write(layer, plan.slots[kv.group_of(layer)], np.concatenate([latents, rotated], axis=1))
    decode = partial(attend_latent_decode, attention, weights, kv, layer)
    prefill = partial(attend_latent_prefill, attention, weights, kv, layer)
    mixed = _by_phase(decode, prefill, queries, batch, batch.tables[kv.group_of(layer)])
    return linear(mixed, weights.o)


def _latent_queries(attention: LatentAttention, weights: LatentWeights, normed: Array) -> Array:
    """[num_tokens, heads * key_dim]"""
    if weights.q is not None:
        return linear(normed, weights.q)
    assert weights.q_a is not None and weights.q_a_norm is not None and weights.q_b is not None
    return linear(rms_norm(linear(normed, weights.q_a), weights.q_a_norm, attention.norm_eps), weights.q_b)


def _growth(growth: QueryGrowth, batch: Batch) -> Array:
    """What each token's queries are multiplied by  # [num_tokens]"""
    contexts = 1 + batch.positions // growth.context
    return (1 + growth.beta * np.log(contexts)).astype(np.float32)


def _by_phase(
    decode: Callable[[Array, Table, Table], Array],
    prefill: Callable[[Array, int, Table], Array],
    queries: Array,
    batch: Batch,
    tables: Table,
) -> Array:
    """Each phase by its own path  # [num_tokens, heads * the width of a head's values]"""
    decodes = batch.num_decodes
    parts = [decode(queries[:decodes], batch.positions[:decodes], tables[:decodes])]
    for segment in range(decodes, batch.num_segments):
        first, count = int(batch.segment_first[segment]), int(batch.segment_count[segment])
        parts.append(prefill(queries[first : first + count], int(batch.segment_start[segment]), tables[segment]))
    return np.concatenate(parts)


def _mlp_block(spec: ModelSpec, layer: LayerSpec, weights: LayerWeights, hidden: Array, join: Join | None) -> Array:
    """What the MLP, or the experts in its place, add  # [num_tokens, hidden]"""
    normed = _maybe_normed(hidden, weights.mlp_norm, spec.norm_eps)
    if isinstance(layer.mlp, MoeSpec) and isinstance(weights.mlp, ExpertWeights):
        if layer.mlp.has_own_norms:
            output = experts_beside(layer.mlp, weights.mlp, hidden, normed, spec.norm_eps, join)
            return _maybe_normed(output, weights.post_mlp_norm, spec.norm_eps)
        output = mixture_of_experts(layer.mlp, weights.mlp, normed)
    else:
        assert isinstance(layer.mlp, DenseMlp) and isinstance(weights.mlp, GatedMlp)
        output = gated_mlp(layer.mlp, weights.mlp, normed)
    if join is not None:
        join(output)
    return _maybe_normed(output, weights.post_mlp_norm, spec.norm_eps)


def _maybe_normed(x: Array, norm: Array | None, eps: float) -> Array:
    return x if norm is None else rms_norm(x, norm, eps)


def _normed_and_rotated(
    attention: GroupedAttention,
    x: Array,
    norm: Array | None,
    eps: float,
    cos: Array,
    sin: Array,
    meeting: NormMeeting | None,
) -> Array:
    """[num_tokens, heads * head_dim] -> [num_tokens, heads, head_dim]. `meeting`: where the norm is over heads of
    several ranks."""
    if attention.norms_rotated:
        turned = rotate(_heads(x, attention.head_dim), cos, sin)
        return _normed_heads(attention, turned.reshape(x.shape), norm, eps, meeting)
    return rotate(_normed_heads(attention, x, norm, eps, meeting), cos, sin)


def _normed_heads(
    attention: GroupedAttention, x: Array, norm: Array | None, eps: float, meeting: NormMeeting | None
) -> Array:
    """Each head normed by itself, or all of a token's together  # [num_tokens, heads, head_dim]"""
    if meeting is not None and norm is not None:
        return _heads(meeting.rms_norm(x, norm, eps), attention.head_dim)
    if attention.norm_spans_heads:
        return _heads(_maybe_normed(x, norm, eps), attention.head_dim)
    return _maybe_normed(_heads(x, attention.head_dim), norm, eps)


def _heads(x: Array, head_dim: int) -> Array:
    """[num_tokens, heads * head_dim] -> [num_tokens, heads, head_dim]"""
    return x.reshape(len(x), -1, head_dim)
