"""A replica on devices that are not here: their data sheet, the shares of it that were measured, and the sizes that an
engine has on a GPU. Needs no weights."""

from __future__ import annotations

from twostroke.cli.simulate_table import Simulated
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.cost.devices import find_device
from twostroke.machine import MemorySpace
from twostroke.planner.asked.decode import kv_needs_of, resolved_on
from twostroke.planner.asked.deployed import deployed, with_copies
from twostroke.planner.asked.model import read_model
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import Efficiency
from twostroke.planner.estimate import expected_of, phases_of
from twostroke.planner.links import link_note
from twostroke.planner.not_run import not_run
from twostroke.planner.simulate import ReplicaSpec
from twostroke.planner.speculating import Speculating
from twostroke.scheduling.config import SchedulerConfig


def on_device(
    model: str, name: str, tensor_parallel: int, config: EngineConfig, speculating: Speculating | None = None
) -> Simulated:
    planned = read_model(model)
    quantise = None if config.quantise == "none" else config.quantise
    kv = "bf16" if config.kv.kind == "auto" else config.kv.kind
    cut = {"tensor_parallel": tensor_parallel, "speculating": speculating}
    deployment = deployed(planned, find_device(name), quantise=quantise, kv=kv, **cut)
    hardware = f"{tensor_parallel} x {deployment.device.name}" if tensor_parallel > 1 else deployment.device.name
    if deployment.kv_space_bytes <= 0:
        needed = deployment.devices_needed(1)
        hint = f": it takes {needed} of them (--tensor-parallel {needed})" if needed is not None else ""
        raise BadRequestError(f"the weights of {planned.name} do not fit on {hardware}{hint}")
    deployment = with_copies(deployment, planned, quantise, config)
    efficiency = expected_of(deployment)
    copies = ", with copies in 12 bits for decode," if deployment.shape.decode_weights is not None else ""
    title = f"{planned.name} in {deployment.kept}{copies} on {hardware}"
    source = f"by {efficiency.source}; error: {efficiency.error}"
    drafts_note = None if speculating is None else speculating.note
    notes = [*not_run(deployment), link_note(deployment), deployment.decode_note, drafts_note]
    said = "; ".join(note for note in notes if note is not None)
    return Simulated(replica_on(deployment, efficiency, config), title, source, said or None)


def replica_on(deployment: Deployment, efficiency: Efficiency, config: EngineConfig) -> ReplicaSpec:
    """One copy of a deployment whose weights fit; of a copy with several lanes, one of them, while all are busy."""
    shape = deployment.lane_shape()
    memory = MemorySpace(
        deployment.device.name, deployment.memory_bytes, deployment.kv_space_bytes // deployment.lanes, 1.0
    )
    resolved = resolved_on(deployment, config, kv_needs_of(shape), memory)
    itl_target_ms = resolved.sizes.itl_target_ms
    return ReplicaSpec(
        phases_of(deployment, efficiency).step_s,
        shape,
        deployment.ceilings,
        SchedulerConfig(
            max_context=resolved.max_context,
            max_tokens_per_step=resolved.sizes.max_tokens_per_step,
            max_running=resolved.sizes.max_running,
            prefix_caching=config.kv.prefix_caching,
        ),
        resolved.layout,
        newcomer_s=efficiency.newcomer_seconds(0),
        itl_target_s=None if itl_target_ms is None else itl_target_ms / 1e3,
        speculating=deployment.speculating,
        policy=config.policy,
        levels=config.promised(),
    )
