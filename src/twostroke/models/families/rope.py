"""Rotary embeddings as files describe them: config.json in its old and new manner, GGUF keys and divisor tensors.
A scaling that is not implemented is refused; none is ever guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from twostroke.core.errors import ModelError
from twostroke.models.families.declaration import StoredTensor
from twostroke.models.families.fields import Fields, shown
from twostroke.models.rope_spec import (
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
    yarn_sharpness,
)

MAX_CONTEXT = 2**30
DEFAULT_THETA = 10_000.0
_MAX_THETA = 1e15
_MAX_FACTOR = 1e6
_NEVER = 1e29


def rope_settings(config: Fields) -> Fields:
    """The rope's own section, whichever name it has: `rope_scaling` until transformers 4, `rope_parameters` since."""
    old, new = config.section("rope_scaling"), config.section("rope_parameters")
    if old is not None and new is not None and old.values != new.values:
        raise config.error("rope_scaling", "differs from rope_parameters, and only one can hold")
    return old or new or replace(config, values={})


def theta_from(settings: Fields, config: Fields, default: float = DEFAULT_THETA) -> float:
    """`rope_theta` from the rope's section, or from the top of the config, where it was before."""
    return settings.number("rope_theta", 1.0, _MAX_THETA, config.number("rope_theta", 1.0, _MAX_THETA, default))


def rope_from_config(config: Fields, dim: int, max_context: int) -> RopeSpec:
    settings = rope_settings(config)
    return RopeSpec(theta_from(settings, config), dim, scaling_from(settings, config, dim, max_context))


def scaling_from(settings: Fields, config: Fields, dim: int, max_context: int) -> RopeScaling | None:
    name = "rope_type" if settings.get("rope_type") is not None else "type"
    kind = settings.text(name, "default")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(settings.number("factor", 1e-3, _MAX_FACTOR))
    if kind == "llama3":
        low, high = settings.number("low_freq_factor", 1e-3, 1e3), settings.number("high_freq_factor", 1e-3, 1e3)
        if low >= high:
            raise settings.error("low_freq_factor", "must be below high_freq_factor")
        original = settings.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
        return Llama3Scaling(settings.number("factor", 1e-3, _MAX_FACTOR), low, high, original)
    if kind in ("longrope", "su"):  # "su" is what Phi-3 called it first
        return _longrope_from(settings, config, dim, max_context)
    if kind == "yarn":
        return _yarn_from(settings, config, max_context)
    settings.refuse(name, f"is {shown(kind)}; the supported ones are default, linear, llama3, longrope and yarn")
    return None


def _yarn_from(settings: Fields, config: Fields, max_context: int) -> YarnScaling:
    if theta_from(settings, config) <= 1.0:
        raise settings.error("rope_theta", "must be above 1 for a rope of type 'yarn'")
    original = settings.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    factor = settings.number("factor", 1e-3, _MAX_FACTOR, max_context / original)
    # DeepSeek's: what queries and keys get beside what scores get (`latent.py`).
    both = [settings.number(name, 0.0, 100.0, 0.0) for name in ("mscale", "mscale_all_dim")]
    own = yarn_sharpness(factor)
    if all(both):
        own = yarn_sharpness(factor, both[0]) / yarn_sharpness(factor, both[1])
    return YarnScaling(
        factor=factor,
        original_max_context=original,
        attention_factor=settings.number("attention_factor", 1e-3, 1e3, own),
        fast_turns=settings.number("beta_fast", 1e-3, 1e6, 32.0),
        slow_turns=settings.number("beta_slow", 1e-3, 1e6, 1.0),
        truncates=settings.flag("truncate", default=True),
    )


def _longrope_from(settings: Fields, config: Fields, dim: int, max_context: int) -> LongRopeScaling:
    # Phi-3 keeps it at the top of its config.
    holder = config if config.get("original_max_position_embeddings") is not None else settings
    original = holder.integer("original_max_position_embeddings", 2, MAX_CONTEXT)
    stretch = settings.number("factor", 1e-3, _MAX_FACTOR, max_context / original)
    return LongRopeScaling(
        short_factors=settings.numbers("short_factor", dim // 2, 1e-6, _MAX_FACTOR),
        long_factors=settings.numbers("long_factor", dim // 2, 1e-6, _MAX_FACTOR),
        original_max_context=original,
        attention_factor=settings.number("attention_factor", 1e-3, 1e3, longrope_attention_factor(stretch, original)),
    )


def longrope_attention_factor(stretch: float, original_max_context: int) -> float:
    """LongRoPE's own choice: attention sharpens a little as the context is stretched."""
    return 1.0 if stretch <= 1.0 else math.sqrt(1 + math.log(stretch) / math.log(original_max_context))


def rope_from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor], dim: int, max_context: int) -> RopeSpec:
    theta = fields.number("rope.freq_base", 1.0, _MAX_THETA, DEFAULT_THETA)
    kind = fields.text("rope.scaling.type", "none")
    fields.refuse_unless({"rope.scaling.type": ("none", "linear", "longrope", "yarn")})
    scaling: RopeScaling | None = None
    if "rope_factors_long.weight" in tensors or "rope_factors_short.weight" in tensors:
        original = fields.integer("rope.scaling.original_context_length", 2, MAX_CONTEXT, max(max_context, 2))
        scaling = LongRopeScaling(
            short_factors=_divisors(fields.source, tensors, "rope_factors_short.weight", dim),
            long_factors=_divisors(fields.source, tensors, "rope_factors_long.weight", dim),
            original_max_context=original,
            attention_factor=fields.number(
                "rope.scaling.attn_factor", 1e-3, 1e3, longrope_attention_factor(max_context / original, original)
            ),
        )
    elif kind == "longrope":
        raise fields.error("rope.scaling.type", "is 'longrope', and the file holds no rope_factors tensors")
    elif "rope_freqs.weight" in tensors:  # Llama 3's scaling, worked out when the file was written
        scaling = FrequencyDivisors(_divisors(fields.source, tensors, "rope_freqs.weight", dim))
        if kind == "linear":
            raise fields.error("rope.scaling.type", "is 'linear' beside a rope_freqs tensor, which is not supported")
    elif kind == "linear":
        scaling = LinearScaling(fields.number("rope.scaling.factor", 1e-3, _MAX_FACTOR))
    elif kind == "yarn":
        scaling = _yarn_from_gguf(fields, theta, max_context)
    return RopeSpec(theta, dim, scaling)


def _yarn_from_gguf(fields: Fields, theta: float, max_context: int) -> YarnScaling:
    """llama.cpp multiplies its own factor by YaRN's, or by the quotient of that and one of Mistral's multiple."""
    if theta <= 1.0:
        raise fields.error("rope.freq_base", "must be above 1 for a rope of type 'yarn'")
    original = fields.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT)
    factor = fields.number("rope.scaling.factor", 1e-3, _MAX_FACTOR, max_context / original)
    multiple = fields.number("rope.scaling.yarn_log_multiplier", 0.0, 100.0, 0.0)
    own = fields.number("rope.scaling.attn_factor", 1e-3, 1e3, 1.0) * yarn_sharpness(factor)
    own /= yarn_sharpness(factor, multiple)
    return YarnScaling(
        factor=factor,
        original_max_context=original,
        attention_factor=own,
        fast_turns=fields.number("rope.scaling.yarn_beta_fast", 1e-3, 1e6, 32.0),
        slow_turns=fields.number("rope.scaling.yarn_beta_slow", 1e-3, 1e6, 1.0),
    )


def _divisors(source: str, tensors: Mapping[str, StoredTensor], name: str, dim: int) -> tuple[float, ...]:
    if name not in tensors:
        raise ModelError(f"{source}: the tensor {name} is missing")
    if tensors[name].shape != (dim // 2,):
        raise ModelError(
            f"{source}: {name} has shape {tensors[name].shape}, and the rotary dimensions ask for {dim // 2}"
        )
    values = tuple(float(value) for value in tensors[name].to_float32())
    # 1e30 is how llama.cpp writes that a pair is not rotated.
    if not all(1e-6 < value < _MAX_FACTOR or value >= _NEVER for value in values):
        raise ModelError(f"{source}: {name} must hold positive numbers only")
    return values
