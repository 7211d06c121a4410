"""What some models have and not every backend computes: which field of a spec asks for it, which backend computes what,
and the sentence that it declines by. Knows declarations alone: a plan asks here, too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

from twostroke.models.rope_spec import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeSpec,
    YarnScaling,
)
from twostroke.models.spec import (
    ClampedGate,
    DenseMlp,
    GatedDeltaNet,
    GroupedAttention,
    LatentAttention,
    LayerInput,
    LayerSpec,
    LearntPlaces,
    Mamba2,
    ModelSpec,
    MoeSpec,
    NormPart,
    QueryGrowth,
    Routing,
    ShortConvolution,
    WideNorms,
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
    PARTS = "it computes whole models, not the part of one that a rank holds"


EVERYTHING = frozenset(Feature)
_CPU_AND_CUDA = frozenset(
    {
        Feature.PARTS,
        Feature.STATES,
        Feature.LATENT,
        Feature.SINKS,
        Feature.GROWTH,
        Feature.OUTPUT_GATE,
        Feature.NO_ROPE,
        Feature.ONE_BLOCK,
        Feature.PLAIN_MLP,
        Feature.SHARED_EXPERTS,
        Feature.ROUTING,
        Feature.EXPERT_BIASES,
        Feature.SHARED_KV,
        Feature.OWN_VALUES,
        Feature.WIDE_NORMS,
        Feature.LATE_NORMS,
        Feature.LAYER_INPUTS,
        Feature.OUTPUT_NORMS,
        Feature.NORMED_EXPERTS,
        Feature.VECTORS,
        Feature.BOTH_WAYS,
        Feature.ENCODER,
    }
)
COMPUTED: dict[str, frozenset[Feature]] = {
    "reference": EVERYTHING,  # what is new is computed here first
    "cpu": _CPU_AND_CUDA | {Feature.RANK_NORMS},
    "cuda": _CPU_AND_CUDA,
}
"""By backend, by name: a Feature that is new is declined until a backend is said to have learnt it. What sizes it takes
is its own to say."""

ASKED_BY: Mapping[type, Mapping[str, Feature]] = {
    ModelSpec: {
        "has_output": Feature.VECTORS,
        "places": Feature.ENCODER,
        "head_rows": Feature.PARTS,
    },
    LayerSpec: {
        "attention": Feature.ONE_BLOCK,
        "mlp": Feature.ONE_BLOCK,
        "layer_input": Feature.LAYER_INPUTS,
        "has_scale": Feature.LAYER_INPUTS,
        "input_norms": Feature.OUTPUT_NORMS,
        "norms_after": Feature.ENCODER,
    },
    GroupedAttention: {
        "has_sinks": Feature.SINKS,
        "growth": Feature.GROWTH,
        "output_gate": Feature.OUTPUT_GATE,
        "shares_kv_of": Feature.SHARED_KV,
        "value_norm": Feature.OWN_VALUES,
        "keys_are_values": Feature.OWN_VALUES,
        "norm_spans_heads": Feature.WIDE_NORMS,
        "wide_norms": Feature.RANK_NORMS,
        "norms_rotated": Feature.LATE_NORMS,
        "is_causal": Feature.BOTH_WAYS,
    },
    LatentAttention: {"growth": Feature.GROWTH},
    RopeSpec: {"dim": Feature.NO_ROPE},
    Mamba2: {"norm_part": Feature.RANK_NORMS},
    DenseMlp: {"is_gated": Feature.PLAIN_MLP, "squared_relu": Feature.PLAIN_MLP},
    MoeSpec: {
        "is_gated": Feature.PLAIN_MLP,
        "squared_relu": Feature.PLAIN_MLP,
        "has_own_norms": Feature.NORMED_EXPERTS,
        "shared": Feature.SHARED_EXPERTS,
        "shared_gate": Feature.SHARED_EXPERTS,
        "router_bias": Feature.ROUTING,
        "has_bias": Feature.EXPERT_BIASES,
        "clamp": Feature.EXPERT_BIASES,
        "held": Feature.PARTS,
    },
    Routing: {
        "scoring": Feature.ROUTING,
        "has_correction": Feature.ROUTING,
        "num_groups": Feature.ROUTING,
        "groups_per_token": Feature.ROUTING,
        "ranked_by": Feature.ROUTING,
        "share_scale": Feature.ROUTING,
    },
}
"""What a field asks of a backend where its value is not the plain one: its default or, of a field without a default,
anything but None and 0."""
KINDS: Mapping[type, Feature | None] = {
    GroupedAttention: None,
    LatentAttention: Feature.LATENT,
    ShortConvolution: Feature.STATES,
    GatedDeltaNet: Feature.STATES,
    Mamba2: Feature.STATES,
}
"""What a kind of attention asks as such."""
BY_RULE: Mapping[type, str] = {
    ModelSpec: "final_norm_bias head_bias",
    LayerSpec: "is_parallel norm_bias",
    DenseMlp: "has_bias clamp is_exact",
    RopeSpec: "pairs_neighbours",
}
"""Fields that a rule reads: one of `uncomputed`, for all backends, or one of a backend that declines it in its own
words."""
BY_ALL: Mapping[type, str] = {
    ModelSpec: (
        "family vocab_size hidden_size max_context layers norm_eps logits_softcap embedding_scale "
        "tied_embeddings final_norm_scale has_final_norm"
    ),
    LearntPlaces: "num_positions first_position num_texts",
    LayerSpec: "sandwich_norms",
    GroupedAttention: "num_heads num_kv_heads head_dim rope window own_scale softcap qkv_bias output_bias qk_norm",
    LatentAttention: "num_heads rank plain_dim rotated_dim value_dim rope query_rank own_scale norm_eps",
    QueryGrowth: "beta context",
    WideNorms: "query_width kv_width counts_keys",
    RopeSpec: "theta scaling",
    Llama3Scaling: "factor low_frequency_factor high_frequency_factor original_max_context",
    LinearScaling: "factor",
    LongRopeScaling: "short_factors long_factors original_max_context attention_factor",
    FrequencyDivisors: "divisors",
    YarnScaling: "factor original_max_context attention_factor fast_turns slow_turns truncates",
    ProportionalScaling: "rotated_pairs factor",
    ShortConvolution: "channels taps",
    GatedDeltaNet: "num_key_heads num_value_heads key_dim value_dim taps tiled",
    Mamba2: "num_heads head_dim state_size num_groups taps conv_bias norm_groups shortest_step longest_step norm_eps",
    NormPart: "group num_groups width",
    LayerInput: "width activation",
    DenseMlp: "intermediate_size activation",
    MoeSpec: (
        "num_experts experts_per_token expert_intermediate_size normalise_weights activation routing latent_size"
    ),
    ClampedGate: "limit alpha",
}
"""Fields that every backend computes, whatever they say, but for sizes, which it declines in its own words. The parts
that they hold have tables of their own."""
ABSORBS_CONTEXT = frozenset({"cuda"})
"""Backends whose chunks bring queries to the latents that lie before them. Others make keys and values of those, as all
do of a chunk's own."""

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
MADE_ON_CARDS = ("fp8", "int4", "q8_0", "q4_1")
"""Kinds that it brings floats to as it loads them, and no others."""


def uncomputed(spec: ModelSpec, backend: str) -> str | None:
    """What a model has that a backend does not compute, in a sentence: each of them asks, and declines. None:
    nothing."""
    learnt = COMPUTED[backend]
    if spec.final_norm_bias or spec.head_bias:
        return "it has no biases on the last norm and the output head"
    own = next((feature for feature in _asked_by(spec) if feature not in learnt), None)
    if own is not None:
        return own.value
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


def features_of(part: Any) -> Iterator[Feature]:
    """Of a layer, or of a part of one, and of the parts in it."""
    if (kind := KINDS.get(type(part))) is not None:
        yield kind
    yield from _asked_by(part)
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from features_of(value)


def _asked_by(part: Any) -> Iterator[Feature]:
    asked = ASKED_BY.get(type(part), {})
    for field in fields(part):
        value, plain = getattr(part, field.name), field.default
        if field.name in asked and (not value if plain is MISSING else value != plain):
            yield asked[field.name]
