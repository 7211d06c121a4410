"""A fleet on Ray as an operator writes it: a TOML file. Every slip is one sentence that names the file and the field.

model = "smollm2"
options = ["--max-context", "4096"]     # of `twostroke serve`, for every worker
drain_s = 30                            # what answers may take to end before a replica is removed
peers = ["10.0.0.0/24"]                 # addresses and networks that machines of this fleet may have, beside those that
                                        # Ray knows when a replica starts: KV is taken from no other

[router]                                # smg, started in the cluster; or router = "http://10.0.0.7:8000", that is there
host = "127.0.0.1"                      # where it listens
port = 8000
resource = "router"                     # optional: a resource of Ray's that only one machine has, where it is to run

[pools.prefill]                         # prefill and decode, or one pool: both
min = 1                                 # 0: none while there is nothing to do; not with a router that is there
max = 4
cpus = 2.0                              # what Ray sets aside for a replica
gpus = 0                                # cards of one replica, on one machine; more than one in [pools.both] alone,
                                        # and where the backend shares one copy between several
resource = "prefill"                    # optional: a resource of Ray's that this pool's machines have
options = ["--threads", "2"]            # for workers of this pool

[scaling]                               # how fast pools follow their load: the fields of cluster/autoscale.py's Rules
hold_s = 300
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.backends import BACKENDS, why_no_ranks
from twostroke.cluster.cards import option_of
from twostroke.cluster.endpoints import check_url
from twostroke.cluster.machines import Machines
from twostroke.cluster.role import Role
from twostroke.core.errors import BadRequestError
from twostroke.core.setting import shown
from twostroke.core.toml_file import as_table, parse_toml, read_toml_text, refuse_unknown

MOST_REPLICAS = 10_000
ON_CARDS = "cuda"
"""The backend that computes there."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    role: Role
    least: int = 1
    most: int = 1
    cpus: float = 1.0
    gpus: int = 0
    resource: str | None = None
    """A resource of Ray's that machines of this pool have; None: any machine."""
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeploymentPlan:
    model: str
    pools: tuple[PoolPlan, ...]
    router_url: str | None = None
    """Of one that is there; None: one is started in the cluster."""
    router_host: str = "127.0.0.1"
    router_port: int = 8000
    router_resource: str | None = None
    options: tuple[str, ...] = ()
    drain_s: float = 30.0
    peers: tuple[str, ...] = ()
    """Machines and networks that KV may be taken from, beside those that are there when a replica starts."""
    scaling: tuple[tuple[str, float], ...] = ()


def read_deployment(path: str | Path) -> DeploymentPlan:
    source = f"the fleet {path}"
    return parse_deployment(read_toml_text(path, source), source)


def parse_deployment(text: str, source: str = "the fleet") -> DeploymentPlan:
    """Raises BadRequestError, naming the place, for anything that is not as described above."""
    given = parse_toml(text, source)
    refuse_unknown(given, ("model", "options", "drain_s", "peers", "router", "pools", "scaling"), source)
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequestError(f'{source}: model must be a name or a path, like "smollm2", not {shown(model):.60}')
    url, host, port, resource = _router(given.get("router", {}), source)
    scaling = as_table(given.get("scaling", {}), f"{source}: scaling")
    options = _options(given, source)
    pools = _pools(as_table(given.get("pools", {}), f"{source}: pools"), source)
    for pool in pools:
        _check_cards(pool, (*options, *pool.options), f"{source}: pools.{pool.role.value}")
    empty = [pool for pool in pools if pool.least == 0]
    if url is not None and empty:
        where = f"{source}: pools.{empty[0].role.value}"
        raise BadRequestError(
            f"{where}: min is 0, and a pool may be empty only behind a router that is started here: "
            "give [router] a port, or the pool a replica"
        )
    return DeploymentPlan(
        model=model,
        pools=pools,
        router_url=url,
        router_host=host,
        router_port=port,
        router_resource=resource,
        options=options,
        drain_s=_number(given, "drain_s", 30.0, 0.0, 86400.0, source),
        peers=_peers(given, source),
        scaling=tuple((name, _number(scaling, name, 0.0, 0.0, 1e6, f"{source}: scaling")) for name in scaling),
    )


def _router(given: Any, source: str) -> tuple[str | None, str, int, str | None]:
    if isinstance(given, str):
        check_url(f"{source}: router", given)
        return given.rstrip("/"), "", 0, None
    table, where = as_table(given, f"{source}: router"), f"{source}: router"
    refuse_unknown(table, ("host", "port", "resource"), where)
    host = table.get("host", "127.0.0.1")
    if not isinstance(host, str) or not host:
        raise BadRequestError(f"{where}.host must be an address to listen on, not {shown(host):.60}")
    port = int(_number(table, "port", 8000, 1, 65535, where, whole=True))
    return None, host, port, _resource(table, where)


def _pools(tables: Mapping[str, Any], source: str) -> tuple[PoolPlan, ...]:
    if set(tables) not in ({"both"}, {"prefill", "decode"}):
        named = ", ".join(tables) or "none"
        raise BadRequestError(f"{source}: pools are [pools.prefill] and [pools.decode], or [pools.both]; here: {named}")
    return tuple(_pool(Role(name), table, f"{source}: pools.{name}") for name, table in sorted(tables.items()))


def _check_cards(pool: PoolPlan, options: Sequence[str], where: str) -> None:
    """Several cards of a replica hold one copy together: what its server would refuse at every start is refused here.
    `options`: those of its server."""
    if pool.gpus <= 1:
        return
    if pool.role is not Role.BOTH:
        raise BadRequestError(
            f"{where}: gpus is {pool.gpus}, and several cards for one copy do not hand KV over yet: "
            "give each replica one card, or use one pool, [pools.both]"
        )
    backend = _backend(options)
    if (why := why_no_ranks(backend)) is not None:
        raise BadRequestError(
            f"{where}: gpus is {pool.gpus}, and the {backend} backend runs no model on several cards: {why}; "
            "give each replica one card"
        )


def _backend(options: Sequence[str]) -> str:
    """That a server with these options has on a machine with cards."""
    named = option_of(options, "--backend")
    return named if named in BACKENDS else ON_CARDS  # `auto` takes it first


def _pool(role: Role, given: Any, where: str) -> PoolPlan:
    table = as_table(given, where)
    refuse_unknown(table, ("min", "max", "cpus", "gpus", "resource", "options"), where)
    least = int(_number(table, "min", 1, 0, MOST_REPLICAS, where, whole=True))
    most = int(_number(table, "max", max(1, least), 1, MOST_REPLICAS, where, whole=True))
    if most < least:
        raise BadRequestError(f"{where}: max is {most}, which is less than min, {least}")
    return PoolPlan(
        role=role,
        least=least,
        most=most,
        cpus=_number(table, "cpus", 1.0, 0.0, 4096.0, where),
        gpus=int(_number(table, "gpus", 0, 0, 64, where, whole=True)),
        resource=_resource(table, where),
        options=_options(table, where),
    )


def _resource(given: Mapping[str, Any], where: str) -> str | None:
    name = given.get("resource")
    if name is not None and (not isinstance(name, str) or not name):
        raise BadRequestError(f"{where}: resource must be the name of a resource, not {shown(name):.60}")
    return name


def _options(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    return _texts(given, "options", '["--threads", "2"]', where)


def _peers(given: Mapping[str, Any], where: str) -> tuple[str, ...]:
    peers = _texts(given, "peers", '["10.0.0.0/24"]', where)
    Machines(peers, f"{where}: peers")  # as each of its servers reads them
    return peers


def _texts(given: Mapping[str, Any], name: str, example: str, where: str) -> tuple[str, ...]:
    found = given.get(name, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BadRequestError(f"{where}: {name} must be a list of texts, like {example}")
    return tuple(found)


def _number(
    given: Mapping[str, Any], name: str, default: float, low: float, high: float, where: str, *, whole: bool = False
) -> float:
    value = given.get(name, default)
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        kind = "an integer" if whole else "a number"
        raise BadRequestError(f"{where}: {name} must be {kind} from {low:g} to {high:g}, not {shown(value):.60}")
    return value  # type: ignore[no-any-return]
