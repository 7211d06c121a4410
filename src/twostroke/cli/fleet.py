"""`twostroke fleet`: several servers behind a router, started here (`up`) or on Ray (`deploy`), and looked at."""

from __future__ import annotations

import json
import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from twostroke import machine
from twostroke.cache import cache_folder
from twostroke.cli import fleet_table, options, server_client
from twostroke.config import EngineConfig
from twostroke.core.errors import BackendError, BadRequestError, TwostrokeError, install_hint

ACTIONS = ("up", "status", "deploy")
DEFAULT_WORKERS = 2

Action = Annotated[str, typer.Argument(metavar="up|status|deploy", help="What to do.")]
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL|URL|FILE]",
        help="up: a model as `serve` takes it. status: the router's address; default: the fleet that runs here. "
        "deploy: a TOML file.",
    ),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help=f"up: plain replicas, which read and write; default: {DEFAULT_WORKERS}.")
]
Prefill = Annotated[int, typer.Option(min=0, help="up: workers that read prompts, and hand their KV over.")]
Decode = Annotated[int, typer.Option(min=0, help="up: workers that write answers.")]
Router = Annotated[str, typer.Option(metavar="smg|vllm-router", help="up: what requests go through.")]
Host = Annotated[str, typer.Option(help="up: where the router listens. Workers listen on this machine only.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="up: the router's port; 0 takes a free one.")]
Serve = Annotated[
    str | None,
    typer.Option(metavar="OPTIONS", help="up: options of `twostroke serve` for every worker, like '--max-queue 64'."),
]
Drain = Annotated[float, typer.Option(min=0.0, help="up: seconds that answers may take to end after Ctrl-C.")]


def fleet(
    action: Action,
    target: Target = None,
    workers: Workers = None,
    prefill: Prefill = 0,
    decode: Decode = 0,
    router: Router = "smg",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    drain: Drain = 30.0,
    serve: Serve = None,
    api_key: server_client.ApiKey = None,
    config: EngineConfig = options.OWN,
) -> None:
    """Run several servers as one: a router in front, workers behind it.

    \b
    twostroke fleet up smollm2 --workers 2               plain replicas; prompts go where their beginning is cached
    twostroke fleet up smollm2 --prefill 1 --decode 2    two pools: one reads prompts, the other writes answers
    twostroke fleet status                               who is there, what each one does
    twostroke fleet deploy fleet.toml                    the same on a Ray cluster, scaled by phase

    `up` prints what runs and follows it: a worker that dies is started again, Ctrl-C lets answers finish and ends all.
    Clients use the router's address as they would use a server's. Cores are shared out between the workers unless
    --threads says otherwise; the engine's options go to every worker.
    """
    if action not in ACTIONS:
        raise BadRequestError(f"`twostroke fleet` takes up, status or deploy, not {action!r}")
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if action == "status":
        _status(target, api_key)
    elif target is None:
        what = "a model: twostroke fleet up smollm2" if action == "up" else "a file: twostroke fleet deploy fleet.toml"
        raise BadRequestError(f"`twostroke fleet {action}` needs {what}")
    elif action == "deploy":
        _deploy(Path(target), console)
    else:
        roles = _roles(workers, prefill, decode)
        worker_options = [*_engine_options(config, len(roles)), *shlex.split(serve or "")]
        _up(target, roles, router, host, port, drain, worker_options, console)


def _roles(workers: int | None, prefill: int, decode: int) -> tuple[str, ...]:
    if workers is not None and (prefill or decode):
        raise BadRequestError("--workers are plain replicas: give them, or --prefill and --decode")
    if bool(prefill) != bool(decode):
        raise BadRequestError("two pools need --prefill and --decode, at least one of each")
    return ("prefill",) * prefill + ("decode",) * decode or ("both",) * (workers or DEFAULT_WORKERS)


def _engine_options(config: EngineConfig, num_workers: int) -> list[str]:
    """For each worker, as they were typed, and its share of the cores."""
    if config.threads is None:
        config = replace(config, threads=max(1, machine.available_threads() // num_workers))
    return options.typed_again(config, EngineConfig())


def _up(
    model: str,
    roles: tuple[str, ...],
    router: str,
    host: str,
    port: int,
    drain_s: float,
    worker_options: list[str],
    console: Console,
) -> None:
    from twostroke.cluster.fleet import Fleet, FleetPlan
    from twostroke.cluster.role import Role
    from twostroke.cluster.routers import check_router
    from twostroke.models.resolve import resolve

    check_router(router)
    resolve(model, progress=console.print)  # once, before several workers would
    folder = fleets_folder() / str(os.getpid())
    plan = FleetPlan(model, tuple(map(Role, roles)), router, port, folder, tuple(worker_options), drain_s, host)
    running = Fleet(plan, console.print)

    def stop(number: int, frame: Any) -> None:
        running.stop()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        console.print(f"starting {router} and {len(roles)} workers; their logs are in {folder}")
        running.start()
        fleet_table.show_members(console, running.members, model, router)
        console.print(f"ready at {running.url}/v1; Ctrl-C ends all")
        running.follow()
    except KeyboardInterrupt:
        console.print("ending: answers in flight may finish; a second Ctrl-C ends all at once")
    finally:
        running.end()
    console.print("all have ended")


def fleets_folder() -> Path:
    return cache_folder() / "fleets"


def _status(url: str | None, api_key: str | None) -> None:
    from twostroke.cluster.endpoints import check_url
    from twostroke.cluster.keys import read_secret, router_key
    from twostroke.cluster.router_client import ROUTER_KEY_VARIABLE
    from twostroke.cluster.status import look

    key, folder = os.environ.get(ROUTER_KEY_VARIABLE), None
    for one, state in running_fleets():
        if url is None or state["url"] == url.rstrip("/"):
            url, folder = str(state["url"]), one
            break
    if url is None:
        raise BadRequestError("no fleet runs on this machine; give the address of a router: twostroke fleet status URL")
    check_url("the router's address", url)
    if folder is not None and key is None:
        key = router_key(read_secret(folder / "key"))
    found = look(url, key, api_key or os.environ.get(server_client.KEY_VARIABLE))
    fleet_table.show_status(Console(highlight=False, markup=False), url, found)


def running_fleets() -> list[tuple[Path, dict[str, Any]]]:
    """On this machine, of this user; the latest first."""
    found = []
    for path in fleets_folder().glob("*/fleet.json"):
        try:
            state = json.loads(path.read_text())
            os.kill(int(state["pid"]), 0)
            found.append((path.stat().st_mtime, path.parent, state))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # one that was killed, or is just being written
    return [(folder, state) for _, folder, state in sorted(found, key=lambda one: one[0], reverse=True)]


def _deploy(path: Path, console: Console) -> None:
    try:
        from twostroke.cluster.deploy import deploy
    except ImportError as error:
        message = f"a fleet on Ray needs the extra [ray], and {error.name} is missing; {install_hint('ray')}"
        raise BackendError(message) from None
    from twostroke.cluster.deployment_file import read_deployment

    plan = read_deployment(path)
    try:
        deploy(plan, console.print)
    except TwostrokeError:
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
