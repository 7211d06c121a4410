"""LFM2, dense and with experts: short convolutions in most layers, attention with norms on q and k in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twostroke.models.families import decoder, experts, hybrid
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec, Routing, ShortConvolution

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
}
_ROUTING = Routing("sigmoid", has_correction=True)


def _from_config(config: Fields) -> ModelSpec:
    return _own(_settings(config), "lfm2", handled=())


def _moe_from_config(config: Fields) -> ModelSpec:
    config = _settings(config).over({"num_dense_layers": 2, "norm_topk_prob": True})
    first = config.integer("num_dense_layers", 0, decoder.MAX_LAYERS)
    config = config.without("num_dense_layers").over({"first_k_dense_replace": first})
    spec = _own(config, "lfm2_moe", handled=(*experts.HANDLED, "first_k_dense_replace"))
    spec = experts.required(spec, config)
    routing = replace(_ROUTING, has_correction=config.flag("use_expert_bias", default=True))
    normalise = config.flag("norm_topk_prob", default=True)
    return experts.with_routing(spec, config, routing, groups=None, normalise_weights=normalise)


def _settings(config: Fields) -> Fields:
    """With the names that other families have for the same."""
    config = replace(config.over(_DEFAULTS), names={"rms_norm_eps": "norm_eps"})
    tied = config.get(config.present("tie_word_embeddings", "tie_embedding"))
    config = config.over({"tie_word_embeddings": True if tied is None else tied})
    return replace(config, values={**config.values, "intermediate_size": _intermediate_size(config)})


def _intermediate_size(config: Fields) -> int:
    """The dense models name a width of which two thirds are taken, rounded up."""
    width = config.integer(config.present("block_ff_dim", "intermediate_size"), 1, experts.MAX_INTERMEDIATE)
    is_dense = config.get(config.present(*experts.COUNTS)) is None
    if not config.flag("block_auto_adjust_ff_dim", default=is_dense):
        return width
    unit = config.integer("block_multiple_of", 1, experts.MAX_INTERMEDIATE, 256)
    width = int(config.number("block_ffn_dim_multiplier", 1e-3, 1e3, 1.0) * int(2 * width / 3))
    return -(-width // unit) * unit


def _own(config: Fields, family: str, handled: tuple[str, ...]) -> ModelSpec:
    config.refuse_unless({"conv_bias": (False,)})
    spec = decoder.spec_from_config(config, family, handled=handled)
    spec = decoder.with_attention(spec, qk_norm=True)
    if config.get("layer_types") is not None:
        kinds = {"conv": True, "full_attention": False}
        keeps_state = hybrid.kept_states(config, "layer_types", kinds, spec.num_layers)
    else:
        whole = range(spec.num_layers)
        attends = config.integers("full_attn_idxs", 0, decoder.MAX_LAYERS) if config.get("full_attn_idxs") else whole
        keeps_state = tuple(index not in attends for index in whole)
    return hybrid.with_states(spec, _convolution(spec, config, "conv_L_cache", 3), keeps_state)


def _convolution(spec: ModelSpec, fields: Fields, name: str, default: int | None) -> ShortConvolution:
    return ShortConvolution(spec.hidden_size, fields.integer(name, 1, hybrid.MAX_TAPS, default))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return _own_from_gguf(fields, tensors, "lfm2", handled=())


def _moe_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = _own_from_gguf(fields, tensors, "lfm2_moe", handled=("expert_count",))
    spec = decoder.with_gguf_experts(spec, fields, tensors, handled=("expert_gating_func",))
    return experts.with_experts(spec, normalise_weights=True)


def _own_from_gguf(
    fields: Fields, tensors: Mapping[str, StoredTensor], family: str, handled: tuple[str, ...]
) -> ModelSpec:
    num_layers = fields.integer("block_count", 1, decoder.MAX_LAYERS)
    fields, keeps_state = hybrid.states_of_gguf(fields, num_layers)
    spec = decoder.spec_from_gguf(fields, tensors, family, handled=handled)
    spec = decoder.with_attention(spec, qk_norm=True)
    return hybrid.with_states(spec, _convolution(spec, fields, "shortconv.l_cache", None), keeps_state)


_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
_MLP = "feed_forward"
_HF_NAMES = replace(
    HF_NAMES,
    whole={
        "model.embed_tokens.weight": ("embedding",),
        "model.embedding_norm.weight": ("final_norm",),
        "lm_head.weight": ("output",),
    },
    layer={
        **{name: targets for name, targets in HF_LAYER.items() if name.startswith("self_attn.")},
        "operator_norm.weight": ("attention_norm",),
        "ffn_norm.weight": ("mlp_norm",),
        "self_attn.out_proj.weight": ("o",),
        "self_attn.q_layernorm.weight": ("q_norm",),
        "self_attn.k_layernorm.weight": ("k_norm",),
        "conv.in_proj.weight": ("b", "c", "x"),
        "conv.conv.weight": ("conv",),
        "conv.out_proj.weight": ("o",),
        **{f"{_MLP}.{stored}.weight": (name,) for stored, name in _PARTS.items()},
        f"{_MLP}.gate.weight": ("router",),
        f"{_MLP}.expert_bias": ("router_correction",),
    },
    experts={f"{_MLP}.experts.{{}}.{stored}.weight": (name,) for stored, name in _PARTS.items()},
    stacked_experts={f"{_MLP}.experts.gate_up_proj": ("gate", "up"), f"{_MLP}.experts.down_proj": ("down",)},
)
_GGUF_EXPERTS = experts.with_gguf_experts(GGUF_NAMES)
_GGUF_NAMES = replace(
    _GGUF_EXPERTS,
    whole={**GGUF_NAMES.whole, "token_embd_norm.weight": ("final_norm",)},
    layer={
        **_GGUF_EXPERTS.layer,
        "shortconv.in_proj.weight": ("b", "c", "x"),
        "shortconv.conv.weight": ("conv",),
        "shortconv.out_proj.weight": ("o",),
    },
)
FAMILY = Family(
    "lfm2",
    ("Lfm2ForCausalLM",),
    ("lfm2",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
MOE_FAMILY = Family(
    "lfm2_moe",
    ("Lfm2MoeForCausalLM",),
    ("lfm2moe",),
    _moe_from_config,
    _moe_from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
