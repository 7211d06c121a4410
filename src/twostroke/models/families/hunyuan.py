"""Hunyuan v1: Llama with a norm over each head of q and k, behind rope. What its files call a dynamic scaling is a base
that `alpha` stretches once and for all. The larger ones have experts in each layer, and beside them an MLP that every
token meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder, experts, rope
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields, shown
from twostroke.models.rope_spec import RopeSpec
from twostroke.models.spec import ModelSpec

_NEUTRAL = {"use_qk_norm": (True,), "use_rotary_pos_emb": (True,), "use_cla": (False,)}


def _own_from_config(config: Fields, family: str, handled: Sequence[str] = ()) -> ModelSpec:
    config.refuse_unless(_NEUTRAL)
    config = config.over({"rms_norm_eps": 1e-5})
    rope.rope_settings(config).refuse_unless({"partial_rotary_factor": (1, 1.0)})
    spec = decoder.spec_from_config(config.without("rope_scaling", "rope_parameters"), family, handled=handled)
    return _own(decoder.with_attention(spec, rope=_rope(config, spec)))


def _rope(config: Fields, spec: ModelSpec) -> RopeSpec:
    settings, dim = rope.rope_settings(config), spec.layers[0].grouped.head_dim
    kind = settings.text("rope_type", settings.text("type", "default"))
    if kind != "dynamic" or settings.get("alpha") is None:
        return rope.rope_from_config(config, dim, spec.max_context)
    if dim == 2:
        raise config.error("head_dim", "is 2, and alpha asks for 4 at least")
    alpha = settings.number("alpha", 1e-3, 1e6)
    return RopeSpec(rope.theta_from(settings, config) * alpha ** (dim / (dim - 2)), dim)


def _own(spec: ModelSpec) -> ModelSpec:
    return decoder.with_attention(spec, qk_norm=True, norms_rotated=True)


def _from_config(config: Fields) -> ModelSpec:
    return _own_from_config(config, "hunyuan_v1_dense")


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    """The base that such a file holds is stretched already."""
    return _own(decoder.spec_from_gguf(fields, tensors, "hunyuan_v1_dense"))


def _moe_from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"use_mixed_mlp_moe": (True,), "norm_topk_prob": (True,), "moe_layer_num_skipped": (0,)})
    width = config.integer("intermediate_size", 1, experts.MAX_INTERMEDIATE)
    num_shared = _in_all_layers(config, "num_shared_expert", 1)
    own = {
        "num_experts": _in_all_layers(config, "num_experts"),
        "num_experts_per_tok": _in_all_layers(config, "moe_topk", 1),
        "moe_intermediate_size": _in_all_layers(config, "moe_intermediate_size", width),
        "shared_expert_intermediate_size": width * num_shared,
    }
    config = replace(config, values={**config.values, **own})
    handled = (*experts.HANDLED, "shared_expert_intermediate_size")
    return experts.required(_own_from_config(config, "hunyuan_v1_moe", handled), config)


def _in_all_layers(config: Fields, name: str, default: int | None = None) -> int:
    """A setting that is one number, or a list with the same one for each layer."""
    value = config.get(name)
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        config = replace(config, values={**config.values, name: value[0]})
    elif isinstance(value, list):
        raise config.error(name, f"is {shown(value)}, and one number for all layers is understood")
    return config.integer(name, 1, experts.MAX_INTERMEDIATE, default)


def _moe_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = _own(decoder.spec_from_gguf(fields, tensors, "hunyuan_v1_moe", handled=("expert_count",)))
    handled = ("expert_shared_count", "expert_shared_feed_forward_length")
    return decoder.with_gguf_experts(spec, fields, tensors, handled)


_HF_LAYER = {
    **HF_LAYER,
    "self_attn.query_layernorm.weight": ("q_norm",),
    "self_attn.key_layernorm.weight": ("k_norm",),
}
FAMILY = Family(
    "hunyuan_v1_dense",
    ("HunYuanDenseV1ForCausalLM",),
    ("hunyuan-dense",),
    _from_config,
    _from_gguf,
    replace(HF_NAMES, layer=_HF_LAYER),
)
_PARTS = ("gate", "up", "down")
MOE_FAMILY = Family(
    "hunyuan_v1_moe",
    ("HunYuanMoEV1ForCausalLM",),
    ("hunyuan-moe",),
    _moe_from_config,
    _moe_from_gguf,
    replace(
        HF_NAMES,
        layer={
            **_HF_LAYER,
            "mlp.gate.wg.weight": ("router",),
            **{f"mlp.shared_mlp.{name}_proj.weight": (f"shared.{name}",) for name in _PARTS},
        },
        experts={f"mlp.experts.{{}}.{name}_proj.weight": (name,) for name in _PARTS},
        stacked_experts=experts.HF_STACKED_EXPERTS,
    ),
    experts.with_gguf_experts(GGUF_NAMES),
)
