"""Mixtral: Mistral with a mixture of experts in place of each layer's MLP, its shares always scaled to a sum of 1. Its
GGUF files say "llama", and are read by that family."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import HF_LAYER, HF_NAMES, Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    spec = decoder.spec_from_config(config, "mixtral", handled=experts.HANDLED)
    return decoder.windowed(experts.required(spec, config), config)


HF_MIXTRAL_NAMES = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "block_sparse_moe.gate.weight": ("router",),
        "mlp.gate.weight": ("router",),  # beside stacked experts
    },
    experts={
        f"block_sparse_moe.experts.{{}}.{stored}.weight": (name,)
        for stored, name in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
    stacked_experts=experts.HF_STACKED_EXPERTS,
)
FAMILY = Family("mixtral", ("MixtralForCausalLM",), (), _from_config, hf_names=HF_MIXTRAL_NAMES)
