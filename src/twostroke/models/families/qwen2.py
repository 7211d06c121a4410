"""Qwen2 and 2.5: biases on q, k and v, none on the output, and a sliding window in the upper layers if asked for."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.models.families import decoder
from twostroke.models.families.declaration import Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.spec import ModelSpec


def with_upper_windows(spec: ModelSpec, config: Fields) -> ModelSpec:
    """Both generations keep a `sliding_window` in their configs that only `use_sliding_window` puts in force."""
    if not config.flag("use_sliding_window", default=False):
        return decoder.windowed(spec, config.without("sliding_window"))
    first = config.integer("max_window_layers", 0, decoder.MAX_LAYERS)
    return decoder.windowed(spec, config, [index >= first for index in range(spec.num_layers)])


def refuse_window(spec: ModelSpec, fields: Fields) -> ModelSpec:
    """Which layers would slide is not written in a Qwen GGUF file, so only a window without effect is let in."""
    window = decoder.window_from(fields, "attention.sliding_window")
    if window is not None and window < spec.max_context:
        raise fields.error("attention.sliding_window", f"is {window}, which is not supported for this architecture")
    return spec


def _from_config(config: Fields) -> ModelSpec:
    config.refuse_unless({"attention_bias": (False,)})
    spec = decoder.with_attention(decoder.spec_from_config(config, "qwen2"), qkv_bias=True)
    return with_upper_windows(spec, config)


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.with_attention(decoder.spec_from_gguf(fields, tensors, "qwen2"), qkv_bias=True)
    return refuse_window(spec, fields)


FAMILY = Family("qwen2", ("Qwen2ForCausalLM", "Qwen2Model"), ("qwen2",), _from_config, _from_gguf)
