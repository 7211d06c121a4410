"""What a simulated fleet is: how many replicas each pool has, the link between the pools, who routes, what fails, and
who is asked how many replicas there should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twostroke.cluster.demand import Signals
from twostroke.core.errors import BadRequestError
from twostroke.planner.fleet.link import Link
from twostroke.planner.fleet.member import Role
from twostroke.planner.fleet.routing import ROUTERS
from twostroke.planner.simulate import ReplicaSpec


@dataclass(frozen=True, slots=True)
class PoolLook:
    """What a scaler sees of one pool."""

    replicas: tuple[Signals, ...]
    starting: int
    held: int


Scaler = Callable[[float, Mapping[Role, PoolLook]], Mapping[Role, tuple[int, str]]]
"""At a moment, from what the pools signal: wanted replicas by pool, and why."""


@dataclass(frozen=True, slots=True)
class Failure:
    moment_s: float
    role: Role
    place: int
    """Among the replicas of its pool that are there, counted round."""


@dataclass(frozen=True, slots=True)
class FleetSpec:
    replica: ReplicaSpec
    """All are alike."""
    decode: int = 1
    """Replicas that write; without a pool that reads, they read too."""
    prefill: int = 0
    link: Link | None = None
    router: str = "least-loaded"
    """Who reads: see ROUTERS. Who writes is whoever has most KV left, where there are two pools."""
    may_stay: bool = True
    """Two pools: whether short prompts and prefix hits are read where they are written."""
    tick_s: float = 0.0
    """How long a replica may go on alone before the others catch up with it: 0 is exact, and slow with hundreds."""
    start_s: float = 60.0
    """Of a replica that is added: until it takes requests."""
    look_s: float = 15.0
    """How often a scaler is asked."""
    failures: tuple[Failure, ...] = ()
    """Each is replaced by a replica that loads."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 1:
            raise BadRequestError(f"a fleet needs replicas that write, not {self.prefill} and {self.decode}")
        if self.router not in ROUTERS:
            raise BadRequestError(f"the router must be one of {', '.join(ROUTERS)}, not {self.router!r:.60}")
        if self.prefill and self.link is None:
            raise BadRequestError("two pools need a link between them")
        if self.prefill and not self.replica.scheduler.prefix_caching:
            raise BadRequestError("two pools need the prefix cache: what is handed over is found there")
