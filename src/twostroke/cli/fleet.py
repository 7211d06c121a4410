"""`twostroke fleet`: several servers behind a router, started here (`up`) or on Ray (`deploy`), and looked at."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from twostroke import machine
from twostroke.cli import fleet_client, fleet_table, options, server_client
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
    from twostroke.cluster.cards import VISIBLE, dealt, visible_cards
    from twostroke.cluster.fleet import Fleet, FleetPlan
    from twostroke.cluster.role import Role
    from twostroke.cluster.routers import check_router
    from twostroke.models.resolve import resolve

    check_router(router)
    cards = dealt(visible_cards(os.environ.get(VISIBLE)), len(roles), worker_options)
    resolve(model, progress=console.print)  # once, before several workers would
    folder = fleet_client.fleets_folder() / str(os.getpid())
    given = tuple(worker_options)
    plan = FleetPlan(model, tuple(map(Role, roles)), router, port, folder, given, drain_s, host, cards)
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


def _status(url: str | None, api_key: str | None) -> None:
    from twostroke.cluster.endpoints import check_url
    from twostroke.cluster.status import look

    if url is None:
        running = fleet_client.running_fleets()
        if not running:
            message = "no fleet runs on this machine; give the address of a router: twostroke fleet status URL"
            raise BadRequestError(message)
        url = str(running[0][1]["url"])
    check_url("the router's address", url)
    found = look(url, fleet_client.key_of_router(url), server_client.key_of(api_key))
    fleet_table.show_status(Console(highlight=False, markup=False), url, found)


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
