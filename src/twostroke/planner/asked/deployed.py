"""One Deployment from a model and a device, for whoever plans: a plan, a simulation, the machine under us. All of them
see the same bits, the same arithmetic and the same name of what the weights are in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twostroke.config import EngineConfig
from twostroke.core.formats import WEIGHT_FORMATS, Formats, find_kv_bits
from twostroke.cost.devices import Device
from twostroke.cost.model_shape import ModelShape
from twostroke.planner.asked.decode import with_decode_weights
from twostroke.planner.asked.model import PlannedModel
from twostroke.planner.deployment import Deployment, kept_in


def deployed(planned: PlannedModel, device: Device, *, quantise: str | None, kv: str, **parts: Any) -> Deployment:
    """`quantise`: what its weights are brought to; None: as its files have them. `parts`: how it is cut, and what is
    supposed of drafts, as the fields of Deployment."""
    formats = replace(Formats.of(quantise or planned.weights, kv), stored=planned.stored)
    own_shape = None if quantise else planned.file_shape(find_kv_bits(kv))
    is_made = quantise is not None and quantise != planned.weights
    return Deployment(planned.name, planned.dimensions, device, formats, is_made=is_made, own_shape=own_shape, **parts)


def deployed_as_held(
    planned: PlannedModel, device: Device, *, held: str, kv: str, shape: ModelShape, **parts: Any
) -> Deployment:
    """As a backend of this machine holds it: `held` names most of its weights. Their arithmetic is the one that they
    are planned in elsewhere."""
    weights = kept_in(held) if kept_in(held) in WEIGHT_FORMATS else planned.weights
    formats = replace(Formats.of(weights, kv), stored=held)
    return Deployment(planned.name, planned.dimensions, device, formats, own_shape=shape, **parts)


def with_copies(
    deployment: Deployment, planned: PlannedModel, quantise: str | None, config: EngineConfig
) -> Deployment:
    """With copies of its weights for decode, where the engine would hold any."""
    return with_decode_weights(deployment, planned, "bf16" if quantise else planned.arithmetic, config)
