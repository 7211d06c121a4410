"""From any config.json to a model's matrices and its ModelShape, without its weights. What the settings mean is the
family's to say (`models/families`), the same for the engine and for whoever counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twostroke.cost.dimensions import Dimensions
from twostroke.cost.model_shape import ModelShape
from twostroke.models.families import declared


def dimensions_from_config(config: Mapping[str, Any]) -> Dimensions:
    """Of the text half of a model. A family that nobody declares is counted as a Llama-like decoder, and says so."""
    found = declared(config)
    return Dimensions(found.spec, not_run=found.not_run, is_assumed=found.is_assumed)


def shape_from_config(
    config: Mapping[str, Any],
    *,
    weight_bits: float,
    kv_bits: float,
    head_bits: float | None = None,
    expert_bits: float | None = None,
) -> ModelShape:
    """What the bits are of: `Dimensions.shape`."""
    return dimensions_from_config(config).shape(
        weight_bits=weight_bits, kv_bits=kv_bits, head_bits=head_bits, expert_bits=expert_bits
    )
