"""What decode would read on a device that is not here: the copies of weights that the backend offers for it, where the
engine's own rule would hold them. A plan of that device counts them as a start on it would."""

from __future__ import annotations

from dataclasses import replace

from twostroke import backends
from twostroke.config import EngineConfig, ResolvedConfig, resolve
from twostroke.core.errors import BadRequestError
from twostroke.core.formats import FormatWish
from twostroke.core.kv_layout import KVGroupNeed
from twostroke.cost.model_shape import DecodeWeights, ModelShape
from twostroke.engine.decode_weights import choose_decode_weights
from twostroke.machine import MemorySpace
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.random_weights import random_tensors
from twostroke.models.weights.tensor import WeightKind
from twostroke.planner.asked.model import PlannedModel, weightless
from twostroke.planner.deployment import KV_SHARE, Deployment


def with_decode_weights(
    deployment: Deployment, planned: PlannedModel, arithmetic: str | None, config: EngineConfig
) -> Deployment:
    """`arithmetic`: what the engine would compute in; None: as the weights are stored. Raises where copies were asked
    for and cannot be had; without a wish a deployment that can have none is left as it is."""
    offered: DecodeWeights | str | None = _out_of_question(deployment)
    if offered is None:
        try:
            checkpoint = _in_bf16(planned)
        except BadRequestError:
            offered = f"this engine does not run {planned.name}"
        else:
            factory = backends.load_factory("cuda")
            formats = factory.formats(checkpoint, FormatWish(arithmetic=arithmetic))
            offered = (
                formats
                if isinstance(formats, str)
                else factory.decode_weights(checkpoint, formats, on=deployment.device)
            )
    elif config.decode_weights != "packed":
        return deployment
    free = max(0, deployment.free_beside_weights_bytes)
    memory = MemorySpace(deployment.device.name, deployment.memory_bytes, free, KV_SHARE)
    needs = kv_needs_of(deployment.shape)
    try:
        holding = choose_decode_weights(
            config, offered, memory, needs, lambda space: resolved_on(deployment, config, needs, space)
        )
    except BadRequestError:
        if config.decode_weights == "packed":
            raise
        return deployment  # not even the weights fit, as the plan will say
    return replace(
        deployment,
        formats=holding.in_formats(deployment.formats),
        decode_weights=holding.copies,
        decode_note=None if holding.copies is not None else holding.reason,
    )


def kv_needs_of(shape: ModelShape) -> tuple[KVGroupNeed, ...]:
    needs: list[KVGroupNeed] = []
    first = 0
    for group in shape.kv_groups:
        layers = tuple(range(first, first + group.num_layers))
        window = None if group.content == "state" else group.window  # to the cost a state is a window of one token
        needs.append(KVGroupNeed(layers, window, group.bytes_per_token, group.content))
        first += group.num_layers
    return tuple(needs)


def resolved_on(
    deployment: Deployment, config: EngineConfig, needs: tuple[KVGroupNeed, ...], memory: MemorySpace
) -> ResolvedConfig:
    """With the sizes that suit the engine on a GPU."""
    max_context = deployment.dimensions.max_context or config.max_context or 8192
    return resolve(config, max_context, needs, memory, backends.load_factory("cuda").suits, 1)


def _out_of_question(deployment: Deployment) -> str | None:
    if deployment.devices_per_copy > 1:
        return "the copies are of models on one device"
    if deployment.device.hopper_sms is None:
        return f"the copies are for Hopper GPUs, and {deployment.device.name} is none"
    if deployment.own_shape is not None or deployment.formats.weights != "bf16":
        kept = "as their file has them" if deployment.own_shape is not None else f"in {deployment.formats.weights}"
        return f"the copies are of bf16 weights, and these are planned {kept}"
    return None


def _in_bf16(planned: PlannedModel) -> Checkpoint:
    if planned.checkpoint is None:
        return weightless(planned)
    return replace(planned.checkpoint, tensors=random_tensors(planned.checkpoint.spec, WeightKind.BF16))
