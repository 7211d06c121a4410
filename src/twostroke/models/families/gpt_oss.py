"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases."""

from __future__ import annotations

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config = config.over({"attention_bias": True})
    spec = decoder.with_attention(decoder.spec_from_config(config, "gpt_oss"), has_sinks=True)
    spec = experts.with_experts(spec, has_bias=True, router_bias=True)
    return decoder.windowed(spec, config, decoder.every_nth_full(spec.num_layers, 2))


_NOT_RUN = "no backend here computes attention with sinks and experts with biases"
FAMILY = Family("gpt_oss", ("GptOssForCausalLM",), ("gpt-oss",), _from_config, not_run=_NOT_RUN)
