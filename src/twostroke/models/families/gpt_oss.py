"""gpt-oss: attention with sinks, a window in every other layer, and experts with biases and clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from twostroke.models.families import decoder, experts
from twostroke.models.families.declaration import GGUF_NAMES, HF_LAYER, HF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.rope_spec import YarnScaling
from twostroke.models.spec import ClampedGate, ModelSpec

_DEFAULTS = {"attention_bias": True, "head_dim": 64, "rope_theta": 150_000.0}


def _from_config(config: Fields) -> ModelSpec:
    config = config.over(_DEFAULTS)
    spec = decoder.spec_from_config(config, "gpt_oss", handled=experts.HANDLED)
    limit, alpha = config.number("swiglu_limit", 1e-3, 1e6, 7.0), config.number("swiglu_alpha", 1e-3, 1e3, 1.702)
    spec = _own(experts.required(spec, config), ClampedGate(limit, alpha))
    return decoder.windowed(spec, config, decoder.every_nth_full(spec.num_layers, 2))


def _own(spec: ModelSpec, clamp: ClampedGate) -> ModelSpec:
    """A softmax of the chosen experts' numbers, which is the same as shares of a softmax scaled to a sum of 1."""
    spec = decoder.with_attention(spec, has_sinks=True)
    return experts.with_experts(spec, has_bias=True, router_bias=True, clamp=clamp)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "gpt_oss", handled=("expert_count",))
    spec = _own(decoder.with_gguf_experts(spec, fields, tensors), ClampedGate())
    rope = spec.layers[0].grouped.rope
    if isinstance(rope.scaling, YarnScaling):  # its makers do not round the blend's ends, and files do not say so
        rope = replace(rope, scaling=replace(rope.scaling, truncates=False))
        spec = decoder.with_attention(spec, rope=rope)
    window = decoder.window_from(fields, "attention.sliding_window")
    return decoder.with_windows(spec, window, decoder.every_nth_full(spec.num_layers, 2))


_STACKS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_HF_STACKS = {f"mlp.experts.{stored}": names for stored, names in _STACKS.items()}
_HF_BIASES = {
    f"mlp.experts.{stored}_bias": tuple(f"{name}_bias" for name in names) for stored, names in _STACKS.items()
}
_HF_EACH = experts.each_by_itself("mlp.experts")
_HF_EACH |= {f"mlp.experts.{{}}.{name}_proj.bias": (f"{name}_bias",) for name in ("gate", "up", "down")}
_HF_NAMES = replace(
    HF_NAMES,
    layer={
        **HF_LAYER,
        "self_attn.sinks": ("sinks",),
        "mlp.router.weight": ("router",),
        "mlp.router.bias": ("router_bias",),
    },
    experts=_HF_EACH,
    stacked_experts={**_HF_STACKS, **_HF_BIASES},
    alternating=frozenset({"mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"}),
    inputs_first=frozenset(_HF_STACKS),
)
_GGUF_EXPERTS = experts.with_gguf_experts(GGUF_NAMES)
_GGUF_NAMES = replace(
    _GGUF_EXPERTS,
    layer={
        **_GGUF_EXPERTS.layer,
        "attn_sinks.weight": ("sinks",),
        "ffn_gate_inp.bias": ("router_bias",),
        "post_attention_norm.weight": ("mlp_norm",),
    },
    stacked_experts={
        **_GGUF_EXPERTS.stacked_experts,
        **{f"ffn_{name}_exps.bias": (f"{name}_bias",) for name in ("gate", "up", "down")},
    },
)
FAMILY = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    ("gpt-oss",),
    _from_config,
    _from_gguf,
    _HF_NAMES,
    _GGUF_NAMES,
)
