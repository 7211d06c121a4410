"""DeepSeek V2 and V3: latent attention, and experts beside one that every token meets."""

from __future__ import annotations

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _v2_from_config(config: Fields) -> ModelSpec:
    return decoder.spec_from_config(config, "deepseek_v2")


def _v3_from_config(config: Fields) -> ModelSpec:
    """Its routers have a correction for each expert, which balances them."""
    return experts.with_experts(decoder.spec_from_config(config, "deepseek_v3"), router_bias=True)


_NOT_RUN = "no backend here computes its latent attention and its shared experts"
V2 = Family("deepseek_v2", ("DeepseekV2ForCausalLM",), (), _v2_from_config, not_run=_NOT_RUN)
# V2's GGUF files say "deepseek2", too.
V3 = Family("deepseek_v3", ("DeepseekV3ForCausalLM",), ("deepseek2",), _v3_from_config, not_run=_NOT_RUN)
