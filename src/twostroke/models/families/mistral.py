"""Mistral: Llama with a sliding window in every layer. Its GGUF files say "llama", and are read by that family."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder, llama
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    return decoder.windowed(decoder.spec_from_config(config, "mistral"), config)


FAMILY = replace(
    llama.FAMILY,
    name="mistral",
    hf_architectures=("MistralForCausalLM",),
    gguf_architectures=(),
    spec_from_config=_from_config,
)
