"""Ministral 3: Mistral with YaRN, and queries that grow with their position."""

from __future__ import annotations

from twostroke.models.families import decoder, latent
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    config = config.over({"head_dim": 128})
    spec = decoder.windowed(decoder.spec_from_config(config, "ministral3"), config)
    return decoder.with_attention(spec, growth=latent.growth_from_config(config))


FAMILY = Family(
    "ministral3",
    ("Ministral3ForCausalLM",),
    (),
    _from_config,
)
