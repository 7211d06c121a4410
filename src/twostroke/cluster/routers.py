"""Routers that a fleet can be run behind, and how each is started. They are programs of others, in extras; this file
knows their options, and which of them take workers in while they run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from twostroke.cluster.bound_child import bound
from twostroke.cluster.role import Role
from twostroke.core.errors import BackendError, BadRequestError

SMG, VLLM_ROUTER = "smg", "vllm-router"
ROUTERS = (SMG, VLLM_ROUTER)
_PACKAGES = {SMG: "smg", VLLM_ROUTER: "vllm_router"}
_SMG_CHILD = (sys.executable, "-P", "-m", "twostroke.cluster.smg_child")
HEALTH_OPTIONS = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "3", "--health-success-threshold", "1"),
)
"""A worker that is dead or stands still is left out after some three seconds, and taken in as soon as it answers. By
their own defaults routers look once a minute; a worker that stands still would be left in for more than two."""


@dataclass(frozen=True, slots=True)
class RouterPlan:
    kind: str
    host: str
    port: int
    metrics_port: int
    has_roles: bool
    """Prefill and decode apart."""

    @property
    def registers(self) -> bool:
        """Whether workers add themselves; otherwise they are named when it starts."""
        return self.kind == SMG

    def command(self, workers: Mapping[str, Role]) -> list[str]:
        """`workers`: by address. Bound to this process."""
        if self.kind == SMG:
            return [*_SMG_CHILD, str(os.getpid()), *self._options(), *self._smg()]
        return bound([sys.executable, "-P", "-m", "vllm_router.launch_router", *self._options(), *self._vllm(workers)])

    def unbound_command(self) -> list[str]:
        """smg, for whoever binds it by other means."""
        return [*_SMG_CHILD, "0", *self._options(), *self._smg()]

    def _options(self) -> list[str]:
        options = ["--host", self.host, "--port", str(self.port), "--prometheus-host", "127.0.0.1"]
        options += ["--prometheus-port", str(self.metrics_port)]
        return [*options, "--log-level", "warn" if self.kind == SMG else "warning"]

    def _smg(self) -> Sequence[str]:
        """Prompts go where their beginning is cached, answers where the fewest are written."""
        ends = ["--shutdown-grace-period-secs", "1"]  # it is told last, when no worker is left
        if self.has_roles:
            return ["--pd-disaggregation", "--prefill-policy", "prefix_hash", "--decode-policy", "least_load", *ends]
        return ["--policy", "cache_aware", *ends]

    def _vllm(self, workers: Mapping[str, Role]) -> Sequence[str]:
        if not self.has_roles:
            return [*HEALTH_OPTIONS, "--policy", "cache_aware", "--worker-urls", *workers]
        ends = [part for url, role in workers.items() for part in (f"--{role.value}", url)]
        return [*HEALTH_OPTIONS, "--vllm-pd-disaggregation", "--policy", "round_robin", *ends]


def check_router(kind: str) -> None:
    """Raises unless this router is known, and here."""
    if kind not in ROUTERS:
        raise BadRequestError(f"a router is one of {', '.join(ROUTERS)}, not {kind!r}")
    if find_spec(_PACKAGES[kind]) is None:
        raise BackendError(f"the router {kind} is not installed here: pip install {kind}")
