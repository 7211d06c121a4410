"""Phi-3: q, k and v in one matrix, gate and up in another, LongRoPE, and a rotation that may cover a part of a head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, rope
from twostroke.models.families.declaration import GGUF_LAYER, GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    spec = decoder.spec_from_config(config, "phi3", rotary_dim=rotary_dim(config), handled=("partial_rotary_factor",))
    return decoder.windowed(spec, config)


def rotary_dim(config: Fields, default: float = 1.0) -> int | None:
    """How much of a head is rotated: `default` of it, unless the rope's section or the config's top names a share."""
    share = rope.rope_settings(config).number(
        "partial_rotary_factor", 0.01, 1.0, config.number("partial_rotary_factor", 0.01, 1.0, default)
    )
    num_heads = config.integer("num_attention_heads", 1, 4096)
    head_dim = config.integer("head_dim", 2, 1024, config.integer("hidden_size", 2, 2**17) // num_heads)
    rotated = int(head_dim * share)
    if rotated < 2 or rotated % 2:
        raise config.error("partial_rotary_factor", f"gives {rotated} rotary dimensions, and pairs are needed")
    return rotated


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "phi3", handled=("rope.dimension_count",))
    window = decoder.window_from(fields, "attention.sliding_window")
    return decoder.with_windows(spec, window, (True,) * spec.num_layers)


_HF_FUSED = {"self_attn.qkv_proj.weight": ("q", "k", "v"), "mlp.gate_up_proj.weight": ("gate", "up")}
_HF_NAMES = replace(HF_NAMES, layer={**HF_LAYER, **_HF_FUSED})
_GGUF_FUSED = {"attn_qkv.weight": ("q", "k", "v"), "ffn_up.weight": ("gate", "up")}
_GGUF_NAMES = replace(GGUF_NAMES, layer={**GGUF_LAYER, **_GGUF_FUSED})
FAMILY = Family("phi3", ("Phi3ForCausalLM",), ("phi3",), _from_config, _from_gguf, _HF_NAMES, _GGUF_NAMES)
