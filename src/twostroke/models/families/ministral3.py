"""Ministral 3: Mistral with YaRN, and queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.models.families import decoder, latent, llama
from twostroke.models.families.declaration import Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    config = config.over({"head_dim": 128})
    spec = decoder.windowed(decoder.spec_from_config(config, "ministral3"), config)
    return decoder.with_attention(spec, growth=latent.growth_from_config(config))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """Mistral Small 3.1 and 3.2 are converted to such files, too: to those that say nothing of YaRN."""
    spec = decoder.spec_from_gguf(fields, tensors, "ministral3", handled=("attention.temperature_scale",))
    return decoder.with_attention(spec, growth=latent.growth_from_gguf(fields))


FAMILY = Family(
    "ministral3",
    ("Ministral3ForCausalLM",),
    ("mistral3",),
    _from_config,
    _from_gguf,
    gguf_names=llama.FAMILY.gguf_names,
)
