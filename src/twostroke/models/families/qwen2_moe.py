"""Qwen2-MoE: Qwen2 with experts, and beside them one that every token meets, by a share of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.qwen2 import refuse_window, with_upper_windows
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    handled = (*experts.HANDLED, "shared_expert_intermediate_size")
    spec = decoder.with_attention(decoder.spec_from_config(config, "qwen2_moe", handled=handled), qkv_bias=True)
    spec = experts.required(spec, config, normalise_weights=config.flag("norm_topk_prob", default=False))
    return with_upper_windows(experts.with_experts(spec, shared_gate=True), config)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """Shares are as they are: llama.cpp scales them to no sum, whatever a key says."""
    fields = replace(fields, values={**fields.values, f"{fields.prefix}expert_weights_norm": False})
    spec = decoder.spec_from_gguf(fields, tensors, "qwen2_moe", handled=("expert_count",))
    spec = decoder.with_gguf_experts(spec, fields, tensors, handled=("expert_shared_feed_forward_length",))
    spec = decoder.with_attention(experts.with_experts(spec, shared_gate=True), qkv_bias=True)
    return refuse_window(spec, fields)


_HF_NAMES = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "mlp.gate.weight": ("router",),
        "mlp.shared_expert_gate.weight": ("shared.router",),
        **{f"mlp.shared_expert.{name}_proj.weight": (f"shared.{name}",) for name in ("gate", "up", "down")},
    },
    experts={f"mlp.experts.{{}}.{name}_proj.weight": (name,) for name in ("gate", "up", "down")},
    stacked_experts=experts.HF_STACKED_EXPERTS,
)
_GGUF_EXPERTS = experts.with_gguf_experts(GGUF_NAMES)
_GGUF_NAMES = replace(_GGUF_EXPERTS, layer={**_GGUF_EXPERTS.layer, "ffn_gate_inp_shexp.weight": ("shared.router",)})
FAMILY = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    ("qwen2moe",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
