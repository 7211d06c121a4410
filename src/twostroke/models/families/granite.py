"""Granite 3, dense: Llama with four multipliers. What each block adds is multiplied by one of them, r: that is the same
as a residual stream divided by r and norms with an epsilon divided by r * r, so no backend need know of it (but a head
that reads the stream sees it divided). Logits are divided by another, which the last norm's weight takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_NAMES, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec

GGUF_KEYS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def scaled(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """`fields`: with the names that folders have."""
    embedding, residual, attention, logits = (fields.number(name, 1e-6, 1e6, 1.0) for name in GGUF_KEYS)
    return replace(
        decoder.with_attention(spec, own_scale=attention),
        embedding_scale=embedding / residual,
        norm_eps=spec.norm_eps / residual**2,
        final_norm_scale=1 / logits,
    )


def _from_config(config: Fields) -> ModelSpec:
    return scaled(decoder.spec_from_config(config, "granite"), config)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "granite", handled=tuple(GGUF_KEYS.values()))
    return scaled(spec, replace(fields, names=GGUF_KEYS))


_HF_NAMES = replace(HF_NAMES, adjust={"final_norm": Adjustment.FINAL_NORM_SCALE})
# Its converter orders rows as Llama's does.
_ROWS = dict.fromkeys(("q", "k", "q_bias", "k_bias"), Adjustment.HALVES_FROM_PAIRS)
_GGUF_NAMES = replace(GGUF_NAMES, adjust={**_HF_NAMES.adjust, **_ROWS})
FAMILY = Family("granite", ("GraniteForCausalLM",), ("granite",), _from_config, _from_gguf, _HF_NAMES, _GGUF_NAMES)
