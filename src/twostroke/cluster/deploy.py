"""A fleet on Ray Serve: a deployment for each pool, each replica of which owns a `twostroke serve` child, and one for
the router unless there is one. Ray places, watches and scales; requests never pass through it. `application` is what a
RayService's `import_path` names."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from twostroke.cluster.deployment_file import DeploymentPlan, PoolPlan, read_deployment
from twostroke.cluster.door import Door
from twostroke.cluster.fleet import LOOPBACK, free_port
from twostroke.cluster.keys import FLEET_KEY_VARIABLE, environment_of, new_fleet_key, router_key
from twostroke.cluster.pool_policy import PoolPolicy, flat
from twostroke.cluster.replica import Child, WorkerReplica, ways_of_kv
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import RouterClient
from twostroke.cluster.routers import RouterPlan, check_router
from twostroke.core.errors import BackendError

APPLICATION = "twostroke"
ROUTER_CPUS = 0.5
ROUTER_START_S = 60.0
HEALTH_S = 2.0
METRICS_S = 2.0
LOOK_S = 2.0
TIED = 0.001
"""Of a resource that says where something runs."""


class Pool:
    """What Ray makes replicas of."""

    async def __init__(self, plan: DeploymentPlan, pool: PoolPlan, fleet_key: str, router: Any) -> None:  # type: ignore[misc]
        """`router`: an address, or the handle of the deployment that knows it."""
        url = router if isinstance(router, str) else await router.address.remote()
        options = [plan.model, *plan.options, *pool.options]
        host = _host_beside(url)
        if pool.role is not Role.BOTH:
            options += ["--role", pool.role.value, *ways_of_kv(host, (*_machines(), *plan.peers))]
        if pool.gpus > 1:
            options += ["--tensor-parallel", str(pool.gpus)]
        environment = environment_of(fleet_key)
        self._worker = await asyncio.to_thread(
            WorkerReplica, options, url, environment, drain_s=plan.drain_s, host=host
        )

    def address(self) -> str:
        return self._worker.address()

    def check_health(self) -> None:
        self._worker.check_health()

    def record_autoscaling_stats(self) -> dict[str, float]:
        try:
            return flat(self._worker.signals())
        except (OSError, ValueError, KeyError):  # its engine is being started anew
            return {}

    def __del__(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.end()


class RouterReplica:
    """smg as a child of one replica; a new one has no workers, and each of them adds itself again. Where pools may be
    empty, it keeps the door."""

    def __init__(self, plan: DeploymentPlan, fleet_key: str) -> None:
        check_router("smg")
        has_roles = any(pool.role is not Role.BOTH for pool in plan.pools)
        smg = RouterPlan("smg", plan.router_host, plan.router_port, free_port(), has_roles)
        host = _own_host() if plan.router_host in ("0.0.0.0", "::") else plan.router_host
        self._url = f"http://{host}:{plan.router_port}"
        self._child = Child(smg.unbound_command(), environment_of(fleet_key), 0.0)
        client = RouterClient(self._url, router_key(fleet_key))
        until_s = time.monotonic() + ROUTER_START_S
        while not client.is_up():
            self._child.check()
            if time.monotonic() >= until_s:
                raise BackendError(f"smg did not start within {ROUTER_START_S:g} s")
            time.sleep(0.1)
        self._asked_for: dict[Role, threading.Thread] = {}
        empty = [pool.role for pool in plan.pools if pool.least == 0]
        self._door = Door(client, urlsplit(self._url).hostname or host, empty, self._wake) if empty else None

    def _wake(self, role: Role) -> None:
        """One call that waits for a replica of that pool: Ray counts it, and tells the policy."""
        if role in self._asked_for and self._asked_for[role].is_alive():
            return

        def wait() -> None:
            with suppress(Exception):  # the pool is being taken down; or it is asked for again
                serve.get_deployment_handle(role.value, APPLICATION).address.remote().result()

        self._asked_for[role] = threading.Thread(target=wait, daemon=True)
        self._asked_for[role].start()

    def address(self) -> str:
        return self._url

    def check_health(self) -> None:
        self._child.check()

    def __del__(self) -> None:
        door: Door | None = getattr(self, "_door", None)
        if door is not None:
            door.close()
        if hasattr(self, "_child"):
            self._child.end()


def _host_beside(router_url: str) -> str:
    """A router that is this machine's own is reached from this machine alone, and so are its workers."""
    return LOOPBACK if urlsplit(router_url).hostname in (LOOPBACK, "localhost") else _own_host()


def _machines() -> list[str]:
    """Those that the cluster has now."""
    return [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]


def _own_host() -> str:
    return str(ray.util.get_node_ip_address())


def fleet_of(plan: DeploymentPlan, fleet_key: str) -> Any:
    """Ray's application: the pools behind one ingress that nobody calls."""
    router: Any = plan.router_url
    if router is None:
        made = serve.deployment(
            name="router",
            num_replicas=1,
            ray_actor_options={"num_cpus": ROUTER_CPUS} | _tied(plan.router_resource),
            health_check_period_s=HEALTH_S,
        )(RouterReplica)
        router = made.bind(plan, fleet_key)
    pools = [_deployment(plan, pool).bind(plan, pool, fleet_key, router) for pool in plan.pools]
    ingress = serve.deployment(name="fleet", num_replicas=1, ray_actor_options={"num_cpus": 0})(Ingress)
    return ingress.bind(router, *pools)


class Ingress:
    """Joins the deployments to one application."""

    def __init__(self, router: Any, *pools: Any) -> None:
        self._router = router

    async def __call__(self) -> str:
        return self._router if isinstance(self._router, str) else await self._router.address.remote()


def _tied(resource: str | None) -> dict[str, Any]:
    """To machines that have it, of which it takes nearly nothing."""
    return {} if resource is None else {"resources": {resource: TIED}}


def _gang(pool: PoolPlan) -> dict[str, Any]:
    """Several cards of one copy are set aside at once, on one machine: one bundle, for its ranks are processes of one
    replica, which sees no card of another bundle."""
    if pool.gpus <= 1:
        return {}
    bundle = {"CPU": pool.cpus, "GPU": float(pool.gpus), **({} if pool.resource is None else {pool.resource: TIED})}
    return {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}


def _deployment(plan: DeploymentPlan, pool: PoolPlan) -> Any:
    kwargs = {"role": pool.role.value, "least": pool.least, "most": pool.most, "scaling": dict(plan.scaling)}
    scaling = AutoscalingConfig(
        min_replicas=pool.least,
        initial_replicas=max(1, pool.least),  # the first one tells the door what models there are
        max_replicas=pool.most,
        upscale_delay_s=0.0,  # the policy itself waits as long as it is wise
        downscale_delay_s=0.0,
        downscale_to_zero_delay_s=0.0,
        metrics_interval_s=METRICS_S,
        look_back_period_s=2 * METRICS_S,
        policy=AutoscalingPolicy(policy_function=PoolPolicy, policy_kwargs=kwargs),
    )
    resources: dict[str, Any] = {"num_cpus": pool.cpus} | _tied(pool.resource)
    resources |= {"num_gpus": pool.gpus} if pool.gpus else {}
    return serve.deployment(
        name=pool.role.value,
        ray_actor_options=resources,
        **_gang(pool),
        autoscaling_config=scaling,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=plan.drain_s + 15.0,
    )(Pool)


def application(arguments: Mapping[str, str]) -> Any:
    """For a RayService: `import_path: twostroke.cluster.deploy:application`, `args: {file: /etc/fleet.toml}`."""
    return fleet_of(read_deployment(arguments["file"]), os.environ.get(FLEET_KEY_VARIABLE) or new_fleet_key())


def deploy(plan: DeploymentPlan, say: Callable[[str], None]) -> None:
    """On the cluster that is there, where the fleet stays when this returns; or on a Ray of its own on this machine,
    which is followed, and ended by Ctrl-C."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_own = not _joined()
    if is_own:
        signal.signal(signal.SIGTERM, _interrupt)  # Ray's own handler would end this process where it stands
    try:
        serve.start(proxy_location="Disabled")
        key = os.environ.get(FLEET_KEY_VARIABLE) or new_fleet_key()
        handle = serve.run(fleet_of(plan, key), name=APPLICATION, route_prefix=None)
        say(f"ready: the router is at {handle.remote().result()}; pools: {_pools_line(plan)}")
        if is_own:
            say("Ray runs on this machine alone, as no cluster was found; Ctrl-C ends all")
            _follow(say)
        else:
            say("the fleet stays when this command ends; `serve status` shows it, `serve shutdown` ends it")
    finally:
        if is_own:
            serve.shutdown()
            ray.shutdown()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _joined() -> bool:
    """Whether there was a cluster to join."""
    try:
        ray.init(address="auto", log_to_driver=False)
        return True
    except ConnectionError:
        ray.init(include_dashboard=False, log_to_driver=False)
        return False


def _pools_line(plan: DeploymentPlan) -> str:
    return ", ".join(f"{pool.role.value} {pool.least} to {pool.most}" for pool in plan.pools)


def _follow(say: Callable[[str], None]) -> None:
    """Says how many replicas each pool has, whenever that changes."""
    before: dict[str, Any] = {}
    while True:
        found = serve.status().applications[APPLICATION].deployments
        now = {name: dict(one.replica_states) for name, one in found.items() if name in list(Role)}
        if now != before:
            say("; ".join(f"{name}: {_states(states)}" for name, states in sorted(now.items())))
            before = now
        time.sleep(LOOK_S)


def _states(states: Mapping[Any, int]) -> str:
    return ", ".join(f"{number} {str(state).lower()}" for state, number in states.items()) or "none"
