"""Mistral 4: DeepSeek's latent attention and experts, routed by a softmax; queries grow with their position."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.models.families import decoder, experts, latent
from twostroke.models.families.declaration import Family, StoredTensor
from twostroke.models.families.deepseek import (
    GGUF_LATENT_NAMES,
    HANDLED,
    HF_LATENT_NAMES,
    latent_experts_from_gguf,
)
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec, Routing


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "mistral4", handled=HANDLED)
    spec = decoder.with_latent(spec, growth=latent.growth_from_config(config))
    normalise = config.flag("norm_topk_prob", default=True)
    return experts.with_routing(spec, config, Routing(ranked_by=2), groups=(1, 1), normalise_weights=normalise)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """Files of Mistral's own weights say "deepseek2". Those of a folder say nothing of queries that grow: llama.cpp's
    converter leaves it out, and does not grow them either."""
    return latent_experts_from_gguf(fields, tensors, "mistral4", ranked_by=2)


FAMILY = Family(
    "mistral4",
    ("Mistral4ForCausalLM",),
    ("mistral4",),
    _from_config,
    _from_gguf,
    HF_LATENT_NAMES,
    GGUF_LATENT_NAMES,
)
