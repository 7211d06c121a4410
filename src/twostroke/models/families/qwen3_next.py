"""Qwen3-Next and Qwen3.5, dense and with experts: gated delta nets in three layers of four, in the others attention
whose output passes a gate and that rotates a part of each head. Norms store their weight less one. A vision half and
the layers that draft (`mtp.`) are left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from twostroke.models.families import decoder, experts, hybrid
from twostroke.models.families.declaration import (
    GGUF_NAMES,
    HF_LAYER,
    HF_NAMES,
    Adjustment,
    Family,
    StoredTensor,
)
from twostroke.models.families.fields import Fields
from twostroke.models.families.phi3 import rotary_dim
from twostroke.models.spec import GatedDeltaNet, ModelSpec

_PERIOD = 4
_KINDS = {"linear_attention": True, "full_attention": False}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "norm_topk_prob": True,
}
_HANDLED = (*experts.HANDLED, "shared_expert_intermediate_size", "linear_num_key_heads", "partial_rotary_factor")


def _from_config(config: Fields) -> ModelSpec:
    return _own(config, "qwen3_next")


def _dense_from_config(config: Fields) -> ModelSpec:
    return _own(_text_half(config), "qwen3_5")


def _moe_from_config(config: Fields) -> ModelSpec:
    config = _text_half(config)
    width = config.integer("moe_intermediate_size", 1, experts.MAX_INTERMEDIATE, 512)
    spec = _own(config.over({"intermediate_size": width}), "qwen3_5_moe")
    return experts.required(spec, config)


def _text_half(config: Fields) -> Fields:
    text = config.section("text_config")
    if text is None:
        return config
    decoder.refuse_quantised(config)
    return text.over({"tie_word_embeddings": config.flag("tie_word_embeddings", default=False)})


def _own(config: Fields, family: str) -> ModelSpec:
    config = config.over(_DEFAULTS)
    config.refuse_unless({"attention_bias": (False,), "attn_output_gate": (True,)})
    spec = decoder.spec_from_config(config, family, rotary_dim=rotary_dim(config, 0.25), handled=_HANDLED)
    spec = _with_gates(spec, normalise_weights=config.flag("norm_topk_prob", default=True))
    if config.get("layer_types") is not None:
        keeps_state = hybrid.kept_states(config, "layer_types", _KINDS, spec.num_layers)
    else:
        period = config.integer("full_attention_interval", 1, decoder.MAX_LAYERS, _PERIOD)
        keeps_state = decoder.every_nth_full(spec.num_layers, period)
    return hybrid.with_states(spec, _delta_net(config), keeps_state)


def _with_gates(spec: ModelSpec, *, normalise_weights: bool) -> ModelSpec:
    spec = decoder.with_attention(spec, qk_norm=True, output_gate=True)
    return experts.with_experts(spec, shared_gate=True, normalise_weights=normalise_weights)


def _delta_net(config: Fields) -> GatedDeltaNet:
    widths = (config.integer(f"linear_{name}_head_dim", 1, hybrid.MAX_HEAD) for name in ("key", "value"))
    key_dim, value_dim = widths
    key_heads = config.integer("linear_num_key_heads", 1, hybrid.MAX_HEADS)
    value_heads = config.integer("linear_num_value_heads", 1, hybrid.MAX_HEADS)
    if value_heads % key_heads:
        raise config.error("linear_num_value_heads", f"is {value_heads}, no multiple of the {key_heads} heads of keys")
    taps = config.integer("linear_conv_kernel_dim", 1, hybrid.MAX_TAPS)
    return GatedDeltaNet(key_heads, value_heads, key_dim, value_dim, taps)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return _own_from_gguf(fields, tensors, "qwen3_next", tiled=False)


def _dense_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return _own_from_gguf(fields, tensors, "qwen3_5", tiled=True)


def _moe_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return _own_from_gguf(fields, tensors, "qwen3_5_moe", tiled=True)


def _own_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor], family: str, *, tiled: bool) -> ModelSpec:
    """`tiled`: files of Qwen3.5 and later order the heads of values for a product that repeats keys as a whole."""
    if experts.has_experts(fields):  # then nothing is said of an MLP's width
        width = fields.integer("expert_feed_forward_length", 1, experts.MAX_INTERMEDIATE)
        fields = fields.over({f"{fields.prefix}feed_forward_length": width})
    handled = ("expert_count", "rope.dimension_count")
    spec = decoder.spec_from_gguf(fields, tensors, family, handled=handled)
    spec = decoder.without_drafting(spec, fields)
    if experts.has_experts(fields):
        spec = decoder.with_gguf_experts(spec, fields, tensors, handled=("expert_shared_feed_forward_length",))
    spec = _with_gates(spec, normalise_weights=True)
    period = fields.integer("full_attention_interval", 1, decoder.MAX_LAYERS, _PERIOD)
    value_heads = fields.integer("ssm.time_step_rank", 1, hybrid.MAX_HEADS)
    own = {
        "linear_key_head_dim": fields.get("ssm.state_size"),
        "linear_value_head_dim": fields.integer("ssm.inner_size", 1, hybrid.MAX_WIDTH) // value_heads,
        "linear_num_key_heads": fields.get("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_conv_kernel_dim": fields.get("ssm.conv_kernel"),
    }
    mixer = replace(_delta_net(Fields(fields.source, own)), tiled=tiled)
    return hybrid.with_states(spec, mixer, decoder.every_nth_full(spec.num_layers, period))


_MIXER = "linear_attn"
_NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")
_HF_NAMES = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "self_attn.q_proj.weight": ("q", "q_gate"),
        f"{_MIXER}.in_proj_qkvz.weight": ("q", "k", "v", "z"),
        f"{_MIXER}.in_proj_ba.weight": ("beta", "dt"),
        f"{_MIXER}.in_proj_qkv.weight": ("q", "k", "v"),
        f"{_MIXER}.in_proj_z.weight": ("z",),
        f"{_MIXER}.in_proj_b.weight": ("beta",),
        f"{_MIXER}.in_proj_a.weight": ("dt",),
        f"{_MIXER}.conv1d.weight": ("conv",),
        f"{_MIXER}.A_log": ("decay",),
        f"{_MIXER}.dt_bias": ("dt_bias",),
        f"{_MIXER}.norm.weight": ("gated_norm",),
        f"{_MIXER}.out_proj.weight": ("o",),
        "mlp.gate.weight": ("router",),
        "mlp.shared_expert_gate.weight": ("shared.router",),
        **{f"mlp.shared_expert.{name}_proj.weight": (f"shared.{name}",) for name in ("gate", "up", "down")},
    },
    experts={f"mlp.experts.{{}}.{name}_proj.weight": (name,) for name in ("gate", "up", "down")},
    stacked_experts=experts.HF_STACKED_EXPERTS,
    by_head=frozenset({"self_attn.q_proj.weight", f"{_MIXER}.in_proj_qkvz.weight", f"{_MIXER}.in_proj_ba.weight"}),
    adjust={**dict.fromkeys(_NORMS, Adjustment.ADD_ONE), "decay": Adjustment.MINUS_EXPONENTIAL},
    ignored_prefixes=("mtp.", "model.visual.", "visual."),
    renamed_prefixes={"model.language_model.": "model."},
)
_GGUF_EXPERTS = experts.with_gguf_experts(GGUF_NAMES)
_GGUF_NAMES = replace(
    _GGUF_EXPERTS,
    layer={
        **_GGUF_EXPERTS.layer,
        "attn_q.weight": ("q", "q_gate"),
        "post_attention_norm.weight": ("mlp_norm",),
        "attn_qkv.weight": ("q", "k", "v"),
        "attn_gate.weight": ("z",),
        "ssm_ba.weight": ("beta", "dt"),
        "ssm_beta.weight": ("beta",),
        "ssm_alpha.weight": ("dt",),
        "ssm_conv1d.weight": ("conv",),
        "ssm_a": ("decay",),
        "ssm_dt.bias": ("dt_bias",),
        "ssm_norm.weight": ("gated_norm",),
        "ssm_out.weight": ("o",),
        "ffn_gate_inp_shexp.weight": ("shared.router",),
    },
    by_head=frozenset({"attn_q.weight", "ssm_ba.weight"}),
    ignores_further_layers=True,
)
FAMILY = Family(
    "qwen3_next",
    ("Qwen3NextForCausalLM",),
    ("qwen3next",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
DENSE_FAMILY = Family(
    "qwen3_5",
    ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ("qwen35",),
    _dense_from_config,
    _dense_from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
MOE_FAMILY = Family(
    "qwen3_5_moe",
    ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ("qwen35moe",),
    _moe_from_config,
    _moe_from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
