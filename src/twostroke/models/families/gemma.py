"""Gemma, the first: Llama with scaled embeddings, wide heads and a gelu gate. Folders store norms' weights less one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.gemma2 import HF_GEMMA_NAMES, with_gelu
from twostroke.models.spec import ModelSpec

_ACTIVATION = "gelu_pytorch_tanh"


def _from_config(config: Fields) -> ModelSpec:
    """Folders of 2024 say "gelu" and mean its approximation, which is what all who read them compute."""
    config.refuse_unless({"hidden_activation": (_ACTIVATION,)})
    if config.get("hidden_act") == "gelu":
        config = config.without("hidden_act")
    config = config.without("hidden_activation").over({"head_dim": 256, "hidden_act": _ACTIVATION})
    return _scaled(decoder.spec_from_config(config, "gemma", tied=True))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    return _scaled(with_gelu(decoder.spec_from_gguf(fields, tensors, "gemma")))


def _scaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding_scale=math.sqrt(spec.hidden_size))


_HF_NAMES = replace(HF_NAMES, adjust=HF_GEMMA_NAMES.adjust)
FAMILY = Family("gemma", ("GemmaForCausalLM",), ("gemma",), _from_config, _from_gguf, _HF_NAMES)
