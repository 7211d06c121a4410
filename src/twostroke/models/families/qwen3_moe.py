"""Qwen3-MoE: Qwen3 with a mixture of experts, smaller than its MLP would be, in place of each layer's MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.qwen2 import refuse_window, with_upper_windows
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config = config.over({"head_dim": 128})
    config.integer("moe_intermediate_size", 1, experts.MAX_INTERMEDIATE)  # not the MLP's size: it has to be there
    spec = decoder.spec_from_config(config, "qwen3_moe", handled=experts.HANDLED)
    spec = experts.required(spec, config, normalise_weights=config.flag("norm_topk_prob", default=False))
    return with_upper_windows(decoder.with_attention(spec, qk_norm=True), config)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "qwen3_moe", handled=("expert_count",))
    spec = decoder.with_attention(decoder.with_gguf_experts(spec, fields, tensors), qk_norm=True)
    return refuse_window(spec, fields)


_HF_NAMES = replace(
    HF_NAMES,
    layer={**HF_LAYER, "mlp.gate.weight": ("router",)},
    experts={f"mlp.experts.{{}}.{name}_proj.weight": (name,) for name in ("gate", "up", "down")},
    stacked_experts=experts.HF_STACKED_EXPERTS,
)
_GGUF_NAMES = experts.with_gguf_experts(GGUF_NAMES)
_HF = ("Qwen3MoeForCausalLM",)
FAMILY = Family("qwen3_moe", _HF, ("qwen3moe",), _from_config, _from_gguf, _HF_NAMES, _GGUF_NAMES)
