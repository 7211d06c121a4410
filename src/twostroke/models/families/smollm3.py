"""SmolLM3: Llama with some layers that rotate nothing."""

from __future__ import annotations

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "smollm3")
    return decoder.windowed(spec, config, (False,) * spec.num_layers)


_NOT_RUN = "every fourth of its layers has no rotary embedding, and each layer has one here"
FAMILY = Family("smollm3", ("SmolLM3ForCausalLM",), ("smollm3",), _from_config, not_run=_NOT_RUN)
