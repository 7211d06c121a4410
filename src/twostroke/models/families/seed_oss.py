"""Seed-OSS: Llama with biases on q, k and v, and heads that are wider together than the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_LAYER, GGUF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config.over({"head_dim": 128, "attention_bias": True}), "seed_oss")
    return decoder.with_attention(spec, output_bias=config.flag("attention_out_bias", default=False))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return decoder.spec_from_gguf(fields, tensors, "seed_oss")


_GGUF_NAMES = replace(GGUF_NAMES, layer={**GGUF_LAYER, "post_attention_norm.weight": ("mlp_norm",)})
FAMILY = Family("seed_oss", ("SeedOssForCausalLM",), ("seed_oss",), _from_config, _from_gguf, gguf_names=_GGUF_NAMES)
