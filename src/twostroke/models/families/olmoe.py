"""OLMoE: Llama with norms over all heads of queries and keys together, and experts in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts, qwen3_moe
from twostroke.models.families.declaration import GGUF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"clip_qkv": ()})
    config = config.over({"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8})
    spec = decoder.spec_from_config(config, "olmoe", handled=experts.HANDLED)
    spec = experts.required(spec, config, normalise_weights=config.flag("norm_topk_prob", default=False))
    return decoder.with_attention(spec, qk_norm=True, norm_spans_heads=True)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """llama.cpp scales no shares of this architecture."""
    spec = decoder.spec_from_gguf(fields, tensors, "olmoe", handled=("expert_count",))
    spec = decoder.with_gguf_experts(spec, fields, tensors)
    spec = experts.with_experts(spec, normalise_weights=fields.flag("expert_weights_norm", default=False))
    return decoder.with_attention(spec, qk_norm=True, norm_spans_heads=True)


FAMILY = Family(
    "olmoe",
    ("OlmoeForCausalLM",),
    ("olmoe",),
    _from_config,
    _from_gguf,
    qwen3_moe.FAMILY.hf_names,
    experts.with_gguf_experts(replace(GGUF_NAMES)),
)
