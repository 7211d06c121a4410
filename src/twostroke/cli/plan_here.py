"""The machine under us as a device to plan on: its ceilings measured, its memory asked for, its weights as a backend
would hold them. Of a model whose files are not here, its shape is enough."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from twostroke import backends, machine
from twostroke.cli.plan_model import PlannedModel
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, ModelError, TwostrokeError
from twostroke.cost.devices import Device, find_device
from twostroke.engine.build import Preparation, kv_needs, prepare
from twostroke.engine.quantise import by_default
from twostroke.engine.shape import shape_of
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.families import FAMILIES
from twostroke.models.random_weights import random_checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import CPU_RECORDS, Efficiency, Fitted


def here(planned: PlannedModel, quantise: str | None, kv: str, devices: int) -> tuple[Deployment, Efficiency | None]:
    if devices != 1 or quantise is not None:
        raise BadRequestError("--on this plans what this engine would run: one device, and no --quantise")
    own = planned.checkpoint or weightless(planned)
    checkpoint = own
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
    prepared = _prepared(own)
    shape = shape_of(checkpoint, [need.bytes_per_token for need in needs]) if prepared is None else prepared.shape
    copies = 0 if shape.decode_weights is None else shape.decode_weights.num_bytes
    deployment = Deployment(
        model=planned.name,
        dimensions=planned.dimensions,
        device=device,
        quantise="bf16",
        kv=kv,
        own_shape=shape,
        own_kv_space_bytes=int(memory.kv_share * max(0, memory.free_beside_weights_bytes - copies)),
    )
    fitted = None if prepared is None else _fitted(prepared, deployment)
    if fitted is not None or factory.name == "cuda":
        return deployment, fitted
    shares = CPU_RECORDS
    if planned.checkpoint is None:
        shares = replace(shares, error=f"unknown: {planned.name} was never run here; of SmolLM2: {shares.error}")
    return deployment, shares


def _prepared(checkpoint: Checkpoint) -> Preparation | None:
    """None: it does not fit, and the plan will say so."""
    try:
        return prepare(checkpoint, EngineConfig())
    except TwostrokeError:
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


def weightless(planned: PlannedModel) -> Checkpoint:
    """A model that is known by its sizes alone, as the engine would hold it. What a list of sizes leaves out, and says
    nothing of speed, is filled in."""
    config = dict(planned.config or {})
    family = str(config.get("model_type")).removesuffix("_text")
    names = [name for one in FAMILIES if one.name == family for name in one.hf_architectures]
    if not names and "architectures" not in config:
        raise BadRequestError(f"--on this plans what this engine would run, and it does not run {family} models")
    config.pop("quantization_config", None)
    filled = {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "max_position_embeddings": 8192}
    with TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps({"architectures": names[:1]} | filled | config), encoding="utf-8")
        try:
            return random_checkpoint(path, WeightKind.BF16, name=planned.name)
        except ModelError as error:
            raise BadRequestError(f"--on this plans what this engine would run, not {planned.name}: {error}") from None


def _sheet(name: str) -> Device | None:
    try:
        return find_device(name)
    except BadRequestError:
        return None
