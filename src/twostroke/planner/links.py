"""What the devices of one copy spend on each other: sums of tensor parallelism, hand-overs between stages, tokens sent
to experts and back. Counted in bytes over the data sheet's link and a latency each; nothing here is measured."""

from __future__ import annotations

from twostroke.core.errors import BadRequestError
from twostroke.cost.dimensions import Part
from twostroke.planner.deployment import DEVICES_A_MACHINE, Deployment

LATENCY_S = 8e-6
"""Of one sum, hand-over or exchange, however small: an assumption."""
ACTIVATION_BYTES = 2


def link_s_per_step(deployment: Deployment) -> float:
    """Latencies of a step of any size: two sums a layer (of attention and of the MLP), a hand-over between stages, and
    of each layer with experts two exchanges, there and back."""
    times = deployment.pipeline_parallel - 1
    if deployment.tensor_parallel > 1:
        times += 2 * deployment.dimensions.num_layers
    if deployment.expert_parallel > 1:
        times += 2 * _expert_layers(deployment)
    return times * LATENCY_S


def link_s_per_token(deployment: Deployment) -> float:
    """Activations of a token over the link of each device of a stage: a sum moves them twice round the ring, less one
    part; stages hand them over once, each device a part; experts get them once for every other group that has one of
    the token's, and give as much back."""
    if deployment.devices_per_copy == 1:
        return 0.0
    device, dimensions = deployment.device, deployment.dimensions
    if device.link_bytes_per_s is None:
        raise BadRequestError(f"{device.name} has no link to a neighbour in the table: it stands alone")
    devices, groups = deployment.tensor_parallel, deployment.expert_parallel
    sums = 2 * dimensions.num_layers * 2 * (devices - 1) / devices
    hand_overs = (deployment.pipeline_parallel - 1) / devices
    elsewhere = (groups - 1) * (1 - (1 - 1 / groups) ** dimensions.experts_per_token)
    exchanges = 2 * _expert_layers(deployment) * elsewhere / devices
    moved = sums + hand_overs + exchanges  # in vectors of the hidden size
    return moved * ACTIVATION_BYTES * dimensions.spec.hidden_size / device.link_bytes_per_s


def link_note(deployment: Deployment) -> str | None:
    if deployment.devices_per_copy <= DEVICES_A_MACHINE:
        return None
    return (
        f"{deployment.devices_per_copy} devices share a copy over the link that joins devices within one machine, most "
        f"of which hold {DEVICES_A_MACHINE}: between machines they wait longer for each other than is counted here"
    )


def _expert_layers(deployment: Deployment) -> int:
    dimensions = deployment.dimensions
    counts = [matrix.count for matrix in dimensions.matrices if matrix.part is Part.EXPERT]
    return max(counts, default=0) // max(1, dimensions.num_experts)
