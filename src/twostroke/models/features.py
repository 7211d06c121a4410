"""What some models have and not every backend computes: which backend computes what, and the sentence that it declines
by. Knows declarations alone: a plan asks here, too."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from twostroke.models.spec import (
    PLAIN_ROUTING,
    DenseMlp,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    Mamba2,
    Mlp,
    ModelSpec,
    MoeSpec,
    Recurrent,
)

LAYERS_DIFFER = "its layers differ in their norms, or in the shape of what they keep, and this backend has one for all"


class Feature(Enum):
    """What some models have and not every backend computes, in what a backend without it says of itself."""

    STATES = "it has no layers that keep a state in place of keys and values"
    LATENT = "it has no latent attention"
    SINKS = "it has no attention with sinks"
    GROWTH = "it has no queries that grow with their position"
    OUTPUT_GATE = "it has no attention whose output passes a gate"
    NO_ROPE = "its attention has a rotary embedding in every layer"
    ONE_BLOCK = "its layers have attention and an MLP, both"
    PLAIN_MLP = "its MLPs have a gate"
    SHARED_EXPERTS = "it has no experts that every token meets"
    ROUTING = "its routers are a softmax without a bias, a correction or groups"
    EXPERT_BIASES = "its experts have no biases and no clamped gates"
    SHARED_KV = "it has no layers that read another layer's keys and values"
    OWN_VALUES = "its values have a matrix of their own, and no norm"
    WIDE_NORMS = "it norms queries and keys by the head alone"
    RANK_NORMS = "its norms are over numbers of one rank"
    LATE_NORMS = "it norms queries and keys before it rotates them"
    LAYER_INPUTS = "it has no vectors for each layer and token, and no scales of layers"
    OUTPUT_NORMS = "its layers have a norm before each block"
    NORMED_EXPERTS = "its experts read what the layer's norm gave"
    VECTORS = "it gives no vectors"
    BOTH_WAYS = "its tokens see only those before them"
    ENCODER = "it has no encoders, whose positions are looked up and whose norms stand behind their blocks"


EVERYTHING = frozenset(Feature)
COMPUTED: dict[str, frozenset[Feature]] = {
    "reference": EVERYTHING,
    "cpu": EVERYTHING,
    "cuda": EVERYTHING - {Feature.RANK_NORMS},
}
"""By backend. What sizes it takes is its own to say."""

KEPT_ON_CARDS = frozenset(
    [
        "fp8",
        "int8",
        "int4",
        "mxfp4",
        "nvfp4",
        "q8_0",
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "q2_k",
        "q3_k",
        "q4_k",
        "q5_k",
        "q6_k",
        "iq4_nl",
        "iq4_xs",
    ]
)
"""Kinds of weights that the cuda backend keeps as files have them. It brings others to 16 bits."""


def uncomputed(spec: ModelSpec, backend: str) -> str | None:
    """What a model has that a backend does not compute, in a sentence: each of them asks, and declines. None:
    nothing."""
    learnt = COMPUTED[backend]
    if spec.final_norm_bias or spec.head_bias:
        return "it has no biases on the last norm and the output head"
    if not spec.has_output and Feature.VECTORS not in learnt:
        return Feature.VECTORS.value
    if spec.places is not None and Feature.ENCODER not in learnt:
        return Feature.ENCODER.value
    reasons = (_uncomputed_layer(layer, learnt) for layer in dict.fromkeys(spec.layers))
    return next((reason for reason in reasons if reason is not None), None)


def _uncomputed_layer(layer: LayerSpec, learnt: frozenset[Feature]) -> str | None:
    lacking = next((feature for feature in features_of(layer) if feature not in learnt), None)
    if lacking is not None:
        return lacking.value
    if layer.norms_after and layer.norm_bias and not layer.is_parallel:
        return None  # an encoder's
    if layer.dense is not None and layer.dense.has_bias:
        return "its MLPs have no biases"
    if layer.is_parallel or layer.norm_bias or layer.norms_after:
        return "its layers have a norm before each block, without a bias"
    return None


def features_of(layer: LayerSpec) -> Iterator[Feature]:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, Recurrent):
        yield Feature.STATES
    if isinstance(attention, Mamba2) and attention.norm_part is not None:
        yield Feature.RANK_NORMS
    if attention is None or mlp is None:
        yield Feature.ONE_BLOCK
    if isinstance(attention, LatentAttention):
        yield Feature.LATENT
    if isinstance(attention, GroupedAttention):
        yield from _features_of_grouped(attention)
    if layer.layer_input is not None or layer.has_scale:
        yield Feature.LAYER_INPUTS
    if not layer.input_norms:
        yield Feature.OUTPUT_NORMS
    if layer.norms_after and layer.norm_bias:
        yield Feature.ENCODER
    elif not all(one.is_gated and not one.squared_relu for one in _mlps_of(mlp)):
        yield Feature.PLAIN_MLP
    if isinstance(mlp, MoeSpec):
        if mlp.has_own_norms:
            yield Feature.NORMED_EXPERTS
        if mlp.shared is not None:
            yield Feature.SHARED_EXPERTS
        if mlp.router_bias or mlp.routing != PLAIN_ROUTING:
            yield Feature.ROUTING
        if mlp.has_bias or mlp.clamp is not None:
            yield Feature.EXPERT_BIASES


def _features_of_grouped(attention: GroupedAttention) -> Iterator[Feature]:
    if attention.has_sinks:
        yield Feature.SINKS
    if attention.growth is not None:
        yield Feature.GROWTH
    if attention.output_gate:
        yield Feature.OUTPUT_GATE
    if attention.rope.dim == 0:
        yield Feature.NO_ROPE
    if attention.shares_kv_of is not None:
        yield Feature.SHARED_KV
    if attention.value_norm or attention.keys_are_values:
        yield Feature.OWN_VALUES
    if attention.norm_spans_heads:
        yield Feature.WIDE_NORMS
    if attention.wide_norms is not None:
        yield Feature.RANK_NORMS
    if attention.norms_rotated:
        yield Feature.LATE_NORMS
    if not attention.is_causal:
        yield Feature.BOTH_WAYS


def _mlps_of(mlp: Mlp | None) -> tuple[DenseMlp, ...]:
    """Itself, or one expert and the MLP beside the experts."""
    if isinstance(mlp, MoeSpec):
        return (mlp.expert,) if mlp.shared is None else (mlp.expert, mlp.shared)
    return () if mlp is None else (mlp,)
