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


FAMILY = Family(
    name="gpt_oss",
    hf_architectures=("GptOssForCausalLM",),
    gguf_architectures=("gpt-oss",),
    spec_from_config=_from_config,
    not_run="no backend here computes attention with sinks and experts with biases",
)
