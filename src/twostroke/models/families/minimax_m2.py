"""MiniMax M2: half of each head rotated, queries and keys normed over all heads together, and experts that are scored
by a sigmoid with a correction, none of them shared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.mixtral import HF_MIXTRAL_NAMES
from twostroke.models.families.phi3 import rotary_dim
from twostroke.models.spec import ModelSpec, Routing

_ROUTING = Routing("sigmoid", has_correction=True)
_DEFAULTS = {"head_dim": 128, "rope_theta": 5_000_000.0}
_NEUTRAL = {
    "scoring_func": ("sigmoid",),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_layer",),
    "use_routing_bias": (True,),
    "shared_intermediate_size": (0,),
    "sliding_window": (),
}


def _from_config(config: Fields) -> ModelSpec:
    config = config.over(_DEFAULTS)
    config.refuse_unless(_NEUTRAL)
    if any(kind != 1 for kind in config.integers("attn_type_list", 0, 9)):
        config.refuse("attn_type_list", "holds layers without softmax attention, which are not supported")
    spec = decoder.spec_from_config(
        config, "minimax_m2", rotary_dim=_rotary_dim(config), handled=(*experts.HANDLED, "partial_rotary_factor")
    )
    return _own(experts.with_experts(experts.required(spec, config), routing=_ROUTING))


def _rotary_dim(config: Fields) -> int | None:
    """Published configs say how many dimensions are rotated, those of transformers 5 which share."""
    if config.get("rotary_dim") is None:
        return rotary_dim(config)
    rotated = config.integer("rotary_dim", 2, config.integer("head_dim", 2, 1024))
    if rotated % 2:
        raise config.error("rotary_dim", f"must be even, not {rotated}")
    return rotated


def _own(spec: ModelSpec) -> ModelSpec:
    return decoder.with_attention(spec, qk_norm=True, norm_spans_heads=True)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    fields = fields.over({f"{fields.prefix}expert_gating_func": 2})  # early files leave it out
    spec = decoder.spec_from_gguf(fields, tensors, "minimax_m2", handled=("expert_count", "rope.dimension_count"))
    return _own(decoder.with_gguf_experts(spec, fields, tensors))


_HF_NAMES = replace(
    HF_MIXTRAL_NAMES,
    layer={
        **HF_MIXTRAL_NAMES.layer,
        "block_sparse_moe.e_score_correction_bias": ("router_correction",),
        "mlp.e_score_correction_bias": ("router_correction",),
    },
    ignores_further_layers=True,
)
FAMILY = Family(
    "minimax_m2",
    ("MiniMaxM2ForCausalLM",),
    ("minimax-m2",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    experts.with_gguf_experts(GGUF_NAMES),
)
