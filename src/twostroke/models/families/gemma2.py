"""Gemma 2: scaled embeddings, a norm before and after each block, soft caps, a gelu gate, and every other layer behind
a sliding window. Its checkpoints store norm weights less one, except in GGUF files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import HF_LAYER, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import DenseMlp, ModelSpec

SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_NORMS = (
    "attention_norm",
    "post_attention_norm",
    "mlp_norm",
    "post_mlp_norm",
    "q_norm",
    "k_norm",
    "final_norm",
)

HF_GEMMA_NAMES = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "post_attention_layernorm.weight": ("post_attention_norm",),
        "pre_feedforward_layernorm.weight": ("mlp_norm",),
        "post_feedforward_layernorm.weight": ("post_mlp_norm",),
    },
    adjust=dict.fromkeys(_NORMS, Adjustment.ADD_ONE),
)


def gemma(spec: ModelSpec) -> ModelSpec:
    """What Gemma 2 and 3 have in common."""
    layers = tuple(replace(layer, sandwich_norms=True) for layer in spec.layers)
    return replace(spec, layers=layers, embedding_scale=math.sqrt(spec.hidden_size))


def gemma_from_gguf(
    fields: Fields, tensors: Mapping[str, StoredTensor], family: str, handled: Sequence[str]
) -> ModelSpec:
    return gemma(with_gelu(decoder.spec_from_gguf(fields, tensors, family, handled=handled)))


def with_gelu(spec: ModelSpec) -> ModelSpec:
    """GGUF files of all Gemmas leave the activation out."""
    return decoder.with_mlps(spec, [DenseMlp(spec.dense_width, "gelu_tanh")] * spec.num_layers)


def soft_cap(fields: Fields, name: str, default: float | None = None) -> float | None:
    value = fields.get(name)
    if value is None:
        return default
    if value == 0 and fields.prefix:  # GGUF's way of saying none
        return None
    return fields.number(name, 1e-3, 1e6)


def scale_from_config(config: Fields) -> float:
    return 1 / math.sqrt(config.number("query_pre_attn_scalar", 1e-3, 1e6))


def scale_from_size(spec: ModelSpec, large_layers: int) -> float:
    """A GGUF file does not hold query_pre_attn_scalar: it is the head size, but for the largest model of each
    generation, which is known by its number of layers."""
    if spec.num_layers == large_layers:
        return 1 / math.sqrt(spec.hidden_size // spec.layers[0].grouped.num_heads)
    return 1 / math.sqrt(spec.layers[0].grouped.head_dim)


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "gemma2", handled=SOFT_CAPS, tied=True)
    softcap = soft_cap(config, "attn_logit_softcapping")
    spec = decoder.with_attention(gemma(spec), own_scale=scale_from_config(config), softcap=softcap)
    spec = replace(spec, logits_softcap=soft_cap(config, "final_logit_softcapping"))
    return decoder.windowed(spec, config, decoder.every_nth_full(spec.num_layers, 2))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = gemma_from_gguf(fields, tensors, "gemma2", handled=SOFT_CAPS)
    softcap = soft_cap(fields, "attn_logit_softcapping", 50.0)
    spec = decoder.with_attention(spec, own_scale=scale_from_size(spec, large_layers=46), softcap=softcap)
    spec = replace(spec, logits_softcap=soft_cap(fields, "final_logit_softcapping", 30.0))
    window = decoder.window_from(fields, "attention.sliding_window", 4096)
    return decoder.with_windows(spec, window, decoder.every_nth_full(spec.num_layers, 2))


FAMILY = Family("gemma2", ("Gemma2ForCausalLM",), ("gemma2",), _from_config, _from_gguf, HF_GEMMA_NAMES)
