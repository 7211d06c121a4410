"""The machine under us as a device to plan on: its ceilings measured, its memory asked for, its weights as a backend
would hold them. Of a model whose files are not here, its shape is enough."""

from __future__ import annotations

from dataclasses import replace

from twostroke import machine
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, TwostrokeError
from twostroke.core.formats import STORED
from twostroke.cost.devices import Device, find_device
from twostroke.engine.build import Preparation, choose, prepare
from twostroke.models.checkpoint import Checkpoint
from twostroke.planner.asked.deployed import deployed_as_held
from twostroke.planner.asked.model import PlannedModel, weightless
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import CPU_RECORDS, Efficiency, Fitted


def here(
    planned: PlannedModel, quantise: str | None, kv: str, devices: int, config: EngineConfig
) -> tuple[Deployment, Efficiency | None]:
    if devices != 1 or quantise is not None:
        raise BadRequestError("--on this plans what this engine would run: one device, and no --quantise")
    checkpoint, found = planned.checkpoint or weightless(planned), machine.detect()
    choice = choose(checkpoint, config, found)
    factory, memory = choice.factory, choice.memory
    ceilings = factory.ceilings(checkpoint, found.threads, choice.formats)
    sheet = _sheet(memory.owner)  # a GPU's shares are of its data sheet, a CPU's of what was measured
    device = sheet or Device(
        name=memory.owner,
        vendor="",
        peak_flops={"bf16": 2 * ceilings.multiply_adds_per_s},
        read_bytes_per_s=ceilings.read_bytes_per_s,
        memory_bytes=memory.total_bytes,
        sources=(ceilings.source,),
    )
    prepared = _prepared(checkpoint, config)
    shape = choice.shape if prepared is None else prepared.shape
    copies = 0 if shape.decode_weights is None else shape.decode_weights.num_bytes
    is_as_stored = choice.formats.weights == STORED
    deployment = deployed_as_held(
        planned,
        device,
        held=checkpoint.main_kind().name if is_as_stored else choice.formats.weights,
        kv=kv,
        shape=shape,
        own_kv_space_bytes=int(memory.kv_share * max(0, memory.free_beside_weights_bytes - copies)),
        own_max_users=None if prepared is None else prepared.resolved.sizes.max_running,
    )
    fitted = None if prepared is None else _fitted(prepared, deployment)
    if fitted is not None or factory.name == "cuda":
        return deployment, fitted
    shares = CPU_RECORDS
    if planned.checkpoint is None:
        shares = replace(shares, error=f"unknown: {planned.name} was never run here; of SmolLM2: {shares.error}")
    return deployment, shares


def _prepared(checkpoint: Checkpoint, config: EngineConfig) -> Preparation | None:
    """None: it does not fit, and the plan will say so."""
    try:
        return prepare(checkpoint, config)
    except TwostrokeError:
        if config.decode_weights == "packed":
            raise
        return None


def _fitted(prepared: Preparation, deployment: Deployment) -> Fitted | None:
    """By what `twostroke calibrate` stored of this model or, where it has not seen it, of another one: what each part
    of a step takes for each second of its floor is a machine's and a backend's more than a model's."""
    own = prepared.calibration()
    calibration = own or prepared.calibration_of_another()
    if calibration is None:
        return None
    source = "twostroke calibrate on this machine"
    error = f"{calibration.error:.1%} of a step on average, over steps that were not fitted"
    if own is None:
        source += f" with {calibration.model}"
        error = f"unknown: {prepared.checkpoint.name} was not measured here; of {calibration.model}, {error}"
    seconds = calibration.step_cost(deployment.shape).seconds
    return Fitted(f"{source}, {calibration.taken}", error, seconds, calibration.newcomer_seconds)


def _sheet(name: str) -> Device | None:
    try:
        return find_device(name)
    except BadRequestError:
        return None
