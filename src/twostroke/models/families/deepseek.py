"""DeepSeek V2 and V3: latent attention, and experts beside one that every token meets."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _v2_from_config(config: Fields) -> ModelSpec:
    return decoder.spec_from_config(config, "deepseek_v2")


def _v3_from_config(config: Fields) -> ModelSpec:
    """Its routers have a correction for each expert, which balances them."""
    return experts.with_experts(decoder.spec_from_config(config, "deepseek_v3"), router_bias=True)


V2 = Family(
    name="deepseek_v2",
    hf_architectures=("DeepseekV2ForCausalLM",),
    spec_from_config=_v2_from_config,
    not_run="no backend here computes its latent attention and its shared experts",
)
V3 = replace(
    V2,
    name="deepseek_v3",
    hf_architectures=("DeepseekV3ForCausalLM",),
    spec_from_config=_v3_from_config,
    gguf_architectures=("deepseek2",),  # V2's files say so, too
)
