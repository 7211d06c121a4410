"""Which way tokens see: `is_causal` of a config.json. Embedders that were made of decoders say false, and transformers
then lets tokens see each other both ways, whatever the family is. So it is read here for all of them."""

from __future__ import annotations

from dataclasses import replace

from twostroke.models.families.fields import Fields
from twostroke.models.spec import GroupedAttention, LayerSpec, ModelSpec

_NAME = "is_causal"


def with_direction(spec: ModelSpec, config: Fields) -> ModelSpec:
    """The spec of a family, whose tokens see each other both ways if its settings say so. Encoders do in any case."""
    text = config.section("text_config")
    told = text if text is not None and text.get(_NAME) is not None else config
    if told.flag(_NAME, default=True) or not spec.is_causal:
        return spec
    if text is not None and told is config:  # transformers asks the text half alone
        config.refuse(_NAME, "is False beside text_config, and not in it: which of the two counts is not known")
        return spec
    if not all(_may_see_both_ways(layer) for layer in spec.layers):
        told.refuse(_NAME, "is False, which is not supported for this model's layers")
        return spec
    return replace(spec, layers=tuple(_both_ways(layer) for layer in spec.layers))


def _may_see_both_ways(layer: LayerSpec) -> bool:
    own = layer.attention
    return isinstance(own, GroupedAttention) and own.shares_kv_of is None and not own.has_sinks


def _both_ways(layer: LayerSpec) -> LayerSpec:
    """A window of tokens that see both ways holds the token at its full distance, on either side."""
    window = None if layer.window is None else layer.window + 1
    return replace(layer, attention=replace(layer.grouped, window=window, is_causal=False))
