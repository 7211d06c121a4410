"""Qwen3: a norm over each head of q and k, and a head size of its own instead of Qwen2's biases. Rerankers among them
carry the matrix that scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_NAMES, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.qwen2 import refuse_window, with_upper_windows
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config = config.over({"head_dim": 128})
    spec = decoder.spec_from_config(config, "qwen3")
    return with_upper_windows(decoder.with_attention(spec, qk_norm=True), config)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "qwen3")
    return refuse_window(decoder.with_attention(spec, qk_norm=True), fields)


SCORING = "Qwen3ForSequenceClassification"
FAMILY = Family(
    "qwen3",
    ("Qwen3ForCausalLM", "Qwen3Model", SCORING),
    ("qwen3",),
    _from_config,
    _from_gguf,
    hf_names=replace(HF_NAMES, ignored_prefixes=("score.",)),
    gguf_names=replace(GGUF_NAMES, ignored_prefixes=(*GGUF_NAMES.ignored_prefixes, "cls.")),
)
