"""EXAONE 4: blocks read the residual stream as it is, and what they give is normed; queries and keys are normed head by
head. Where some layers slide, the others know no positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_NAMES, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.families.olmo import HF_POST_NORMS
from twostroke.models.rope_spec import NO_ROPE
from twostroke.models.spec import ModelSpec

_PERIOD = 4


def _own(spec: ModelSpec) -> ModelSpec:
    layers = tuple(replace(layer, sandwich_norms=True, input_norms=False) for layer in spec.layers)
    return decoder.with_attention(replace(spec, layers=layers), qk_norm=True)


def _from_config(config: Fields) -> ModelSpec:
    config = config.over({"rms_norm_eps": 1e-5})
    spec = _own(decoder.spec_from_config(config, "exaone4"))
    if config.get("sliding_window") is None:  # the smallest: layers all alike
        return spec
    pattern = config.get("sliding_window_pattern")
    if isinstance(pattern, str):
        by_rule = _spelt(config, pattern, spec.num_layers)
    else:
        period = config.integer("sliding_window_pattern", 1, decoder.MAX_LAYERS, _PERIOD)
        by_rule = decoder.every_nth_full(spec.num_layers, period)
    sliding = decoder.sliding_layers(config, spec.num_layers, by_rule)
    return without_positions(decoder.windowed(spec, config, sliding), sliding)


def _spelt(config: Fields, pattern: str, num_layers: int) -> tuple[bool, ...]:
    """LLLG: three that slide, then one that does not. The last layer never does."""
    if not pattern or set(pattern) - {"L", "G"}:
        raise config.error("sliding_window_pattern", "must be a number, or letters L and G")
    return tuple(pattern[index % len(pattern)] == "L" and index + 1 < num_layers for index in range(num_layers))


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = _own(decoder.spec_from_gguf(fields, tensors, "exaone4"))
    window = decoder.window_from(fields, "attention.sliding_window")
    if window is None:
        return spec
    sliding = decoder.every_nth_full(spec.num_layers, _PERIOD)
    return without_positions(decoder.with_windows(spec, window, sliding), sliding)


def without_positions(spec: ModelSpec, sliding: Sequence[bool]) -> ModelSpec:
    layers = (
        layer if slides else replace(layer, attention=replace(layer.grouped, rope=NO_ROPE))
        for layer, slides in zip(spec.layers, sliding, strict=True)
    )
    return replace(spec, layers=tuple(layers))


FAMILY = Family(
    "exaone4",
    ("Exaone4ForCausalLM",),
    ("exaone4",),
    _from_config,
    _from_gguf,
    HF_POST_NORMS,
    GGUF_NAMES,
)
