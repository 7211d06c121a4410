"""OLMo 2 and 3: blocks read the residual stream as it is, and what they give is normed; so are queries and keys, over
all heads together. Of OLMo 3's layers three in four slide, and only the others' rope is stretched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder, rope
from twostroke.models.families.declaration import GGUF_LAYER, GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import ModelSpec

_PERIOD = 4
_DEFAULTS = {"rms_norm_eps": 1e-5}


def _olmo(spec: ModelSpec) -> ModelSpec:
    layers = tuple(replace(layer, sandwich_norms=True, input_norms=False) for layer in spec.layers)
    return decoder.with_attention(replace(spec, layers=layers), qk_norm=True, norm_spans_heads=True)


def _v2_from_config(config: Fields) -> ModelSpec:
    return _olmo(decoder.spec_from_config(config.over(_DEFAULTS), "olmo2"))


def _v3_from_config(config: Fields) -> ModelSpec:
    config = config.over({**_DEFAULTS, "sliding_window": 4096})
    plain = config.without("rope_parameters", "rope_scaling")
    spec = _olmo(decoder.spec_from_config(plain, "olmo3"))
    sliding = decoder.sliding_layers(config, spec.num_layers, decoder.every_nth_full(spec.num_layers, _PERIOD))
    spec = decoder.windowed(spec, config, sliding)
    parameters, nothing = config.section("rope_parameters"), replace(config, values={})
    local, whole = nothing, config.section("rope_scaling") or nothing
    if parameters is not None:
        local, whole = parameters.section("sliding_attention") or nothing, parameters.section("full_attention") or whole
    dim = spec.layers[0].grouped.head_dim
    ropes = [
        RopeSpec(rope.theta_from(own, config), dim, rope.scaling_from(own, config, dim, spec.max_context))
        for own in (local, whole)
    ]
    return _with_ropes(spec, sliding, ropes[0], ropes[1])


def _with_ropes(spec: ModelSpec, sliding: Sequence[bool], local: RopeSpec, whole: RopeSpec) -> ModelSpec:
    layers = tuple(
        replace(layer, attention=replace(layer.grouped, rope=local if slides else whole))
        for layer, slides in zip(spec.layers, sliding, strict=True)
    )
    return replace(spec, layers=layers)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """Both say "olmo2"; a window tells the third."""
    spec = _olmo(decoder.spec_from_gguf(fields, tensors, "olmo2"))
    window = decoder.window_from(fields, "attention.sliding_window")
    if window is None:
        return spec
    sliding = decoder.every_nth_full(spec.num_layers, _PERIOD)
    whole = spec.layers[0].grouped.rope
    local = replace(whole, scaling=None)
    return replace(_with_ropes(decoder.with_windows(spec, window, sliding), sliding, local, whole), family="olmo3")


HF_POST_NORMS = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "post_attention_layernorm.weight": ("post_attention_norm",),
        "post_feedforward_layernorm.weight": ("post_mlp_norm",),
    },
)
OLMO2 = Family(
    "olmo2",
    ("Olmo2ForCausalLM",),
    ("olmo2",),
    _v2_from_config,
    _from_gguf,
    HF_POST_NORMS,
    replace(GGUF_NAMES, layer=GGUF_LAYER),
)
OLMO3 = Family("olmo3", ("Olmo3ForCausalLM",), (), _v3_from_config, hf_names=HF_POST_NORMS)
