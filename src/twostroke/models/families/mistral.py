"""Mistral: Llama with a sliding window in every layer, and Ministral, whose config says in which. GGUF files of Mistral
say "llama", and are read by that family. Embedders are saved as the bare decoder."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    return decoder.windowed(decoder.spec_from_config(config, "mistral"), config)


FAMILY = Family("mistral", ("MistralForCausalLM", "MistralModel"), (), _from_config)
MINISTRAL = Family(
    "ministral", ("MinistralForCausalLM",), (), lambda config: replace(_from_config(config), family="ministral")
)
