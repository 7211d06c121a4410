"""Gemma 3, text: Gemma 2 with norms on q and k instead of attention's soft cap, five sliding layers to a full one, and
a rope for each kind. The text half of a model that also sees images is taken out of it; the vision half is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder, rope
from twostroke.models.families.declaration import GGUF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.gemma2 import (
    HF_GEMMA_NAMES,
    gemma,
    gemma_from_gguf,
    scale_from_config,
    scale_from_size,
    soft_cap,
)
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import ModelSpec

_EMBEDDING = "gemma-embedding"
DENSE_STEPS = ("dense_2.weight", "dense_3.weight")
"""The matrices of a GGUF file that a vector goes through in turn."""
_PERIOD = 6
_LOCAL_THETA = 10_000.0
_GLOBAL_THETA = 1_000_000.0
# Google's configs leave out what equals these.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
}


def _from_config(config: Fields) -> ModelSpec:
    config = _text_config(config).over(_DEFAULTS)
    shared = config.without("rope_parameters", "rope_scaling", "rope_theta")  # its two ropes are read below
    handled = ("final_logit_softcapping", "use_bidirectional_attention")
    spec = gemma(decoder.spec_from_config(shared, "gemma3", handled=handled, tied=True))
    both_ways = config.flag("use_bidirectional_attention", default=False)
    if both_ways and config.get("sliding_window") is not None:
        config = config.without("sliding_window").over({"sliding_window": _ahead(config, "sliding_window")})
    spec = decoder.with_attention(spec, qk_norm=True, own_scale=scale_from_config(config), is_causal=not both_ways)
    spec = replace(spec, logits_softcap=soft_cap(config, "final_logit_softcapping"))
    period = config.integer("sliding_window_pattern", 1, decoder.MAX_LAYERS, _PERIOD)
    sliding = decoder.sliding_layers(config, spec.num_layers, decoder.every_nth_full(spec.num_layers, period))
    local, whole = _ropes_from_config(config, spec.layers[0].grouped.head_dim, spec.max_context)
    return _with_ropes(decoder.windowed(spec, config, sliding), sliding, local, whole)


def _ahead(fields: Fields, name: str) -> int:
    """A window of tokens that see both ways is told as wide as it is in all, ahead and back."""
    return fields.integer(name, 1, rope.MAX_CONTEXT) // 2 + 1


def _text_config(config: Fields) -> Fields:
    text = config.section("text_config")
    if text is None:
        return config
    decoder.refuse_quantised(config)
    return text.over({"tie_word_embeddings": config.flag("tie_word_embeddings", default=True)})


def _ropes_from_config(config: Fields, head_dim: int, max_context: int) -> tuple[RopeSpec, RopeSpec]:
    parameters = config.section("rope_parameters")
    nothing = replace(config, values={})
    if parameters is not None:  # one section for each kind of layer
        config.refuse_unless({"rope_scaling": ()})
        local, whole = parameters.section("sliding_attention"), parameters.section("full_attention")
        if local is None and whole is None:
            raise config.error("rope_parameters", "must hold sliding_attention and full_attention")
    else:
        local, whole = None, config.section("rope_scaling")
    local, whole = local or nothing, whole or nothing
    local_default = config.number("rope_local_base_freq", 1.0, 1e15, _LOCAL_THETA)
    ropes = []
    for settings, theta in (
        (local, rope.theta_from(local, nothing, local_default)),
        (whole, rope.theta_from(whole, config, _GLOBAL_THETA)),
    ):
        settings.refuse_unless({"partial_rotary_factor": (1, 1.0)})
        scaling = rope.scaling_from(settings, config, head_dim, max_context)
        ropes.append(RopeSpec(theta, head_dim, scaling))
    return ropes[0], ropes[1]


def _with_ropes(spec: ModelSpec, sliding: Sequence[bool], local: RopeSpec, whole: RopeSpec) -> ModelSpec:
    layers = tuple(
        replace(layer, attention=replace(layer.grouped, rope=local if slides else whole))
        for layer, slides in zip(spec.layers, sliding, strict=True)
    )
    return replace(spec, layers=layers)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    read = _embedding_from_gguf if fields.prefix == f"{_EMBEDDING}." else _decoder_from_gguf
    return read(fields, tensors)


def _decoder_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    fields = fields.over({f"{fields.prefix}rope.freq_base": _GLOBAL_THETA})
    spec = gemma_from_gguf(fields, tensors, "gemma3", handled=("final_logit_softcapping",))
    spec = decoder.with_attention(spec, qk_norm=True, own_scale=scale_from_size(spec, large_layers=62))
    spec = replace(spec, logits_softcap=soft_cap(fields, "final_logit_softcapping"))
    window = decoder.window_from(fields, "attention.sliding_window")
    if window is None:
        return spec
    sliding = _pattern_from_gguf(fields, spec.num_layers)
    whole = spec.layers[0].grouped.rope
    local = RopeSpec(fields.number("rope.freq_base_swa", 1.0, 1e15, _LOCAL_THETA), whole.dim)
    return _with_ropes(decoder.with_windows(spec, window, sliding), sliding, local, whole)


def _embedding_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """EmbeddingGemma: tokens see each other both ways."""
    window = f"{fields.prefix}attention.sliding_window"
    if decoder.window_from(fields, "attention.sliding_window") is not None:
        fields = replace(fields, values={**fields.values, window: _ahead(fields, "attention.sliding_window")})
    spec = _decoder_from_gguf(fields, tensors)
    return decoder.with_attention(spec, is_causal=False, own_scale=spec.layers[0].grouped.head_dim ** -0.5)


def _pattern_from_gguf(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Most files leave the pattern out; some hold a period, some a flag a layer."""
    name = "attention.sliding_window_pattern"
    value = fields.get(name)
    if isinstance(value, list):
        if len(value) != num_layers or not all(isinstance(entry, bool) for entry in value):
            raise fields.error(name, f"must hold a flag for each of the {num_layers} layers")
        return tuple(value)
    return decoder.every_nth_full(num_layers, fields.integer(name, 1, decoder.MAX_LAYERS, _PERIOD))


_HF_NAMES = replace(
    HF_GEMMA_NAMES,
    ignored_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    renamed_prefixes={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
)
_HF = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3TextModel")
# What vectors go through is read where pooling is (`models/pooled.py`).
_GGUF_NAMES = replace(GGUF_NAMES, ignored_prefixes=(*GGUF_NAMES.ignored_prefixes, *DENSE_STEPS))
FAMILY = Family("gemma3", _HF, ("gemma3", _EMBEDDING), _from_config, _from_gguf, _HF_NAMES, _GGUF_NAMES)
