"""GLM-4, dense (0414 and Z1): Llama with half of each head rotated, by neighbours, biases on q, k and v, and norms on
both sides of each block. Rows of q and k are put in order as they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.phi3 import rotary_dim
from twostroke.models.spec import ModelSpec


def _own(spec: ModelSpec, has_bias: bool) -> ModelSpec:
    layers = tuple(replace(layer, sandwich_norms=True) for layer in spec.layers)
    return decoder.with_attention(replace(spec, layers=layers), qkv_bias=has_bias, output_bias=False)


def _from_config(config: Fields) -> ModelSpec:
    handled = ("partial_rotary_factor",)
    spec = decoder.spec_from_config(config, "glm4", rotary_dim=rotary_dim(config, 0.5), handled=handled)
    return _own(spec, config.flag("attention_bias", default=False))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "glm4", handled=("rope.dimension_count",))
    return _own(spec, "blk.0.attn_q.bias" in tensors)


_ROWS = dict.fromkeys(("q", "k", "q_bias", "k_bias"), Adjustment.HALVES_FROM_PAIRS)
_HF_NAMES = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "post_self_attn_layernorm.weight": ("post_attention_norm",),
        "post_mlp_layernorm.weight": ("post_mlp_norm",),
        "mlp.gate_up_proj.weight": ("gate", "up"),
    },
    adjust=_ROWS,
)
_GGUF_NAMES = replace(GGUF_NAMES, layer={**GGUF_NAMES.layer, "ffn_up.weight": ("gate", "up")}, adjust=_ROWS)
FAMILY = Family("glm4", ("Glm4ForCausalLM",), ("glm4",), _from_config, _from_gguf, _HF_NAMES, _GGUF_NAMES)
