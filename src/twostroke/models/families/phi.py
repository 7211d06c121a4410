"""Phi, 1 to 2: attention and an MLP without a gate side by side behind one LayerNorm, and biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family
from twostroke.models.families.fields import Fields
from twostroke.models.spec import DenseMlp, ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config.over({"attention_bias": True}), "phi")
    mlp = DenseMlp(spec.dense_width, is_gated=False, has_bias=True)
    layers = tuple(replace(layer, mlp=mlp, is_parallel=True, norm_bias=True) for layer in spec.layers)
    return replace(spec, layers=layers, final_norm_bias=True, head_bias=True)


_NOT_RUN = "no backend here computes LayerNorms with biases and blocks side by side"
FAMILY = Family("phi", ("PhiForCausalLM",), ("phi2",), _from_config, not_run=_NOT_RUN)
