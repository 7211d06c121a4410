"""SmolLM3: Llama with some layers that rotate nothing."""

from __future__ import annotations

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "smollm3")
    return decoder.windowed(spec, config, (False,) * spec.num_layers)


FAMILY = Family(
    name="smollm3",
    hf_architectures=("SmolLM3ForCausalLM",),
    gguf_architectures=("smollm3",),
    spec_from_config=_from_config,
    not_run="every fourth of its layers has no rotary embedding, and each layer has one here",
)
