"""Qwen2-MoE: Qwen2 with experts, and beside them one that every token meets, by a share of its own."""

from __future__ import annotations

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.families.qwen2 import with_upper_windows
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.with_attention(decoder.spec_from_config(config, "qwen2_moe"), qkv_bias=True)
    return with_upper_windows(experts.with_experts(spec, shared_gate=True), config)


_NOT_RUN = "no backend here computes experts that every token meets"
FAMILY = Family("qwen2_moe", ("Qwen2MoeForCausalLM",), ("qwen2moe",), _from_config, not_run=_NOT_RUN)
