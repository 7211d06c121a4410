"""Qwen2-MoE: Qwen2 with experts, and beside them one that every token meets, by a share of its own."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import HF_LAYER, HF_NAMES, Family
from twostroke.models.families.fields import Fields
from twostroke.models.families.qwen2 import with_upper_windows
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    handled = (*experts.HANDLED, "shared_expert_intermediate_size")
    spec = decoder.with_attention(decoder.spec_from_config(config, "qwen2_moe", handled=handled), qkv_bias=True)
    spec = experts.required(spec, config, normalise_weights=config.flag("norm_topk_prob", default=False))
    return with_upper_windows(experts.with_experts(spec, shared_gate=True), config)


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
FAMILY = Family(
    "qwen2_moe",
    ("Qwen2MoeForCausalLM",),
    (),
    _from_config,
    hf_names=_HF_NAMES,
)
