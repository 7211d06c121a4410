"""Granite 3 with experts, and with an MLP that every token meets beside them: Granite 3's multipliers, and the names of
Granite 4's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts, granite, granite_hybrid
from twostroke.models.families.declaration import Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import DenseMlp, ModelSpec

_HANDLED = (*experts.HANDLED, "shared_intermediate_size")


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "granitemoe", handled=_HANDLED)
    spec = experts.required(spec, config)
    return granite.scaled(spec, config)


def _shared_from_config(config: Fields) -> ModelSpec:
    shared = config.integer("shared_intermediate_size", 0, experts.MAX_INTERMEDIATE, 1024)
    spec = replace(_from_config(config), family="granitemoeshared")
    return experts.with_experts(spec, shared=DenseMlp(shared)) if shared else spec


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """Both kinds say "granitemoe"."""
    handled = (*granite.GGUF_KEYS.values(), "expert_count")
    spec = decoder.spec_from_gguf(fields, tensors, "granitemoe", handled=handled)
    spec = decoder.with_gguf_experts(spec, fields, tensors, handled=("expert_shared_feed_forward_length",))
    return granite.scaled(spec, replace(fields, names=granite.GGUF_KEYS))


_HF_NAMES = replace(granite_hybrid.HF_NAMES_OF_EXPERTS, adjust={"final_norm": Adjustment.FINAL_NORM_SCALE})
FAMILY = Family(
    "granitemoe",
    ("GraniteMoeForCausalLM",),
    ("granitemoe",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    experts.with_gguf_experts(granite.FAMILY.gguf_names),
)
SHARED = Family("granitemoeshared", ("GraniteMoeSharedForCausalLM",), (), _shared_from_config, hf_names=_HF_NAMES)
