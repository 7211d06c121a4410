"""Mistral: Llama with a sliding window in every layer. Its GGUF files say "llama", and are read by that family."""

from __future__ import annotations

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    return decoder.windowed(decoder.spec_from_config(config, "mistral"), config)


FAMILY = Family("mistral", ("MistralForCausalLM",), (), _from_config)
