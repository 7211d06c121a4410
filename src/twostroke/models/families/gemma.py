"""Gemma, the first: Llama with scaled embeddings, wide heads and a gelu gate."""

from __future__ import annotations

import math
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config.over({"head_dim": 256}), "gemma", tied=True)
    return replace(spec, embedding_scale=math.sqrt(spec.hidden_size))


_NOT_RUN = "this engine has not been held against any model of it"
FAMILY = Family("gemma", ("GemmaForCausalLM",), ("gemma",), _from_config, not_run=_NOT_RUN)
