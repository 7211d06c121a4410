"""What of a deployment this engine does not run, or has not run yet: a plan is of any model on any device, in any
format, and a reader should know which of them is arithmetic alone."""

from __future__ import annotations

from twostroke.core.formats import GPU_FLOATS
from twostroke.models.features import KEPT_ON_CARDS, MADE_ON_CARDS, uncomputed
from twostroke.planner.deployment import Deployment
from twostroke.planner.form_factors import IN_16_BITS

GPU_KV_OF_ONE_BYTE = ("fp8", "int8")


def not_run(deployment: Deployment) -> tuple[str, ...]:
    """A sentence each; none: this engine has run such a model on such a device."""
    if deployment.own_kv_space_bytes is not None:
        return ()  # a backend of this machine said what it would do
    model, device = deployment.dimensions.not_run, deployment.device
    reasons = [reason for reason in (model, device.not_run) if reason is not None]
    if device.vendor != "NVIDIA":
        return tuple(reasons)  # where it does not run at all, formats are no matter
    if (lacking := uncomputed(deployment.dimensions.spec, "cuda")) is not None:
        reasons.append(f"on a GPU this engine does not run this model: its cuda backend says that {lacking}")
    kept, kv = deployment.kept, deployment.formats.kv
    if (declined := _declined_weights(kept, is_made=deployment.is_made)) is not None:
        reasons.append(f"{declined}: {kept} is planned, not run")
    if kv not in (*GPU_FLOATS, *GPU_KV_OF_ONE_BYTE):
        reasons.append(f"on a GPU this engine keeps KV in 16 or 8 bits: {kv} is planned, not run")
    if (devices := deployment.devices_per_copy) > deployment.tensor_parallel:
        reasons.append(f"this engine has no stages and no groups of experts: {devices} are planned, not run")
    elif devices > 1:
        reasons.append(f"ranks on several devices are written and were not run: {devices} are planned, not run")
    return tuple(reasons)


def _declined_weights(kept: str, *, is_made: bool) -> str | None:
    if kept in IN_16_BITS:
        return None
    if is_made and kept not in MADE_ON_CARDS:
        also = f", and keeps {kept} only where files have it" if kept in KEPT_ON_CARDS else ""
        return f"on a GPU this engine brings weights to {', '.join(MADE_ON_CARDS)} as it loads them{also}"
    return None if kept in KEPT_ON_CARDS else f"on a GPU this engine brings {kept} to 16 bits"
