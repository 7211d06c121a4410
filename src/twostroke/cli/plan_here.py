"""The machine under us as a device to plan on: its ceilings measured, its memory asked for, its weights as a backend
would hold them. Needs the model's files."""

from __future__ import annotations

from twostroke import backends, machine
from twostroke.cli.plan_model import PlannedModel
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.cost.devices import Device, find_device
from twostroke.engine.build import kv_needs, prepare
from twostroke.engine.quantise import by_default
from twostroke.engine.shape import shape_of
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import CPU_RECORDS, Efficiency, Fitted


def here(planned: PlannedModel, quantise: str | None, kv: str, devices: int) -> tuple[Deployment, Efficiency | None]:
    if planned.checkpoint is None:
        raise BadRequestError("--on this measures with the model's own weights: give a model whose files are here")
    if devices != 1 or quantise is not None:
        raise BadRequestError("--on this plans what this engine would run: one device, and no --quantise")
    checkpoint = planned.checkpoint
    factory, _ = backends.choose("auto", checkpoint)
    found = machine.detect()
    if factory.quantises_on_load:
        checkpoint, _ = by_default(checkpoint, found)
    ceilings = factory.ceilings(checkpoint, found.threads)
    memory = factory.memory(checkpoint, found)
    needs = kv_needs(factory, checkpoint)
    sheet = _sheet(memory.owner)  # a GPU's shares are of its data sheet, a CPU's of what was measured
    device = sheet or Device(
        name=memory.owner,
        vendor="",
        peak_flops={"bf16": 2 * ceilings.multiply_adds_per_s},
        read_bytes_per_s=ceilings.read_bytes_per_s,
        memory_bytes=memory.total_bytes,
        sources=(ceilings.source,),
    )
    deployment = Deployment(
        model=planned.name,
        dimensions=planned.dimensions,
        device=device,
        quantise="bf16",
        kv=kv,
        own_shape=shape_of(checkpoint, [need.bytes_per_token for need in needs]),
        own_kv_space_bytes=int(memory.kv_share * memory.free_beside_weights_bytes),
    )
    calibration = prepare(planned.checkpoint, EngineConfig()).calibration()
    if calibration is not None:
        fitted = Fitted(
            source=f"twostroke calibrate on this machine, {calibration.taken}",
            error=f"{calibration.error:.1%} of a step on average, over steps that were not fitted",
            seconds=calibration.step_cost(deployment.shape).seconds,
        )
        return deployment, fitted
    return deployment, None if factory.name == "cuda" else CPU_RECORDS


def _sheet(name: str) -> Device | None:
    try:
        return find_device(name)
    except BadRequestError:
        return None
