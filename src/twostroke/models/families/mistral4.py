"""Mistral 4: DeepSeek's latent attention and experts, routed by a softmax; queries grow with their position."""

from __future__ import annotations

from twostroke.models.families import decoder, experts, latent
from twostroke.models.families.declaration import Family
from twostroke.models.families.deepseek import HANDLED, HF_LATENT_NAMES
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec, Routing


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "mistral4", handled=HANDLED)
    spec = decoder.with_latent(spec, growth=latent.growth_from_config(config))
    normalise = config.flag("norm_topk_prob", default=True)
    return experts.with_routing(spec, config, Routing(ranked_by=2), groups=(1, 1), normalise_weights=normalise)


FAMILY = Family("mistral4", ("Mistral4ForCausalLM",), (), _from_config, hf_names=HF_LATENT_NAMES)
