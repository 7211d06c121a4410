"""Llama 2 and 3, SmolLM2, and everything else that says LlamaForCausalLM: the plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"sliding_window": ()})
    spec = decoder.spec_from_config(config, "llama")
    return decoder.windowed(spec, config, (False,) * spec.num_layers)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    if experts.has_experts(fields):  # Mixtral's files say "llama" as well
        spec = decoder.spec_from_gguf(fields, tensors, "mixtral", handled=("expert_count",))
        spec = decoder.with_gguf_experts(spec, fields, tensors)
    else:
        spec = decoder.spec_from_gguf(fields, tensors, "llama")
    # Mistral's files are "llama" files too; where a window is written, it holds for every layer.
    window = decoder.window_from(fields, "attention.sliding_window")
    return decoder.with_windows(spec, window, (True,) * spec.num_layers)


_HALVES = dict.fromkeys(("q", "k", "q_bias", "k_bias"), Adjustment.HALVES_FROM_PAIRS)
_GGUF_NAMES = experts.with_gguf_experts(replace(GGUF_NAMES, adjust=_HALVES))
FAMILY = Family(
    "llama", ("LlamaForCausalLM", "LlamaModel"), ("llama",), _from_config, _from_gguf, gguf_names=_GGUF_NAMES
)
