"""SmolLM3: Llama with some layers that rotate nothing, every fourth unless its files say otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from twostroke.models.families import decoder
from twostroke.models.families.declaration import GGUF_NAMES, Adjustment, Family, StoredTensor
from twostroke.models.families.fields import Fields
from twostroke.models.rope_spec import NO_ROPE
from twostroke.models.spec import ModelSpec

_PERIOD = 4


def _from_config(config: Fields) -> ModelSpec:
    spec = decoder.spec_from_config(config, "smollm3")
    spec = decoder.windowed(spec, config, (False,) * spec.num_layers)
    name = "no_rope_layers"
    if config.get(name) is None:
        period = config.integer("no_rope_layer_interval", 1, decoder.MAX_LAYERS, _PERIOD)
        return _rotated(spec, decoder.every_nth_full(spec.num_layers, period))
    flags = config.integers(name, 0, 1)  # whatever its name says: 1 where a layer rotates
    if len(flags) != spec.num_layers:
        raise config.error(name, f"must hold a number for each of {spec.num_layers} layers, not {len(flags)}")
    return _rotated(spec, [flag == 1 for flag in flags])


def _from_gguf(fields: Fields, tensors: Mapping[str, StoredTensor]) -> ModelSpec:
    spec = decoder.spec_from_gguf(fields, tensors, "smollm3")
    return _rotated(spec, decoder.every_nth_full(spec.num_layers, _PERIOD))


def _rotated(spec: ModelSpec, rotates: Sequence[bool]) -> ModelSpec:
    layers = (
        layer if is_rotated else replace(layer, attention=replace(layer.grouped, rope=NO_ROPE))
        for layer, is_rotated in zip(spec.layers, rotates, strict=True)
    )
    return replace(spec, layers=tuple(layers))


_GGUF_NAMES = replace(GGUF_NAMES, adjust=dict.fromkeys(("q", "k"), Adjustment.HALVES_FROM_PAIRS))
FAMILY = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    ("smollm3",),
    _from_config,
    _from_gguf,
    gguf_names=_GGUF_NAMES,
)
