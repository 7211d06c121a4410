"""`twostroke simulate`: serve a trace that never came on replicas that do not exist, with the real scheduler, and say
what its users would have felt."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.cli import options
from twostroke.cli.simulate_pools import pools_of
from twostroke.cli.simulate_wish import ReplicasWish, TraceWish, requests_of
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, ModelError
from twostroke.planner.asked.speculation import SpeculationWish

if TYPE_CHECKING:
    from twostroke.cli.simulate_table import Simulated
    from twostroke.planner.fleet.report import FleetReport
    from twostroke.planner.fleet.spec import FleetSpec
    from twostroke.planner.report import SimulationReport
    from twostroke.planner.simulate import ReplicaSpec
    from twostroke.planner.speculating import Speculating
    from twostroke.planner.trace import TraceRequest

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A short name (smollm2), a .gguf file, a Hugging Face folder, or a Hub id (org/name); with --on "
        "DEVICE also a name of the plan's (Llama-3.1-70B, gpt-oss-120b, ...) or a config.json.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        help=(
            "A file instead: a JSON object a line with arrival_s, prompt_tokens, output_tokens and, where prompts "
            "begin alike, prefix (a name) and prefix_tokens; tenant names who sent it, service_level its class."
        )
    ),
]
ONE_REPLICA, SOME_TRACE, NO_DRAFTS = ReplicasWish(), TraceWish(), SpeculationWish()


def simulate(
    model: Model,
    replicas: ReplicasWish = ONE_REPLICA,
    drawn: TraceWish = SOME_TRACE,
    drafts: SpeculationWish = NO_DRAFTS,
    trace: TraceFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a record instead of a table.")] = False,
    config: EngineConfig = options.OWN,
) -> None:
    """What would users feel? Plays a trace through the real scheduler on a virtual clock, thousands of requests in
    seconds.

    A step takes what calibration found on this machine (twostroke calibrate MODEL); with --on DEVICE, what the plan
    expects of it, and no weights are needed.

    \b
    twostroke simulate smollm2 --rate 4 --input 100-500 --output 20-100 --slo-ttft-ms 500
    twostroke simulate Llama-3.1-70B --on h200 --tensor-parallel 2 --replicas 4 --rate 10 --input 200-2000
    twostroke simulate Llama-3.1-8B --on h200 --rate 10 --accept 0.7 --drafts 4
    twostroke simulate Llama-3.1-8B --on h200 --trace mixed.jsonl --service-levels levels.toml --policy fifo
    twostroke simulate Llama-3.1-8B --on h200 --prefill 3 --decode 5 --link 50 --rate 40 --input 4000
    """
    from twostroke.cli import simulate_table
    from twostroke.planner.simulate import classify_trace

    objective = replicas.objective()
    asked = drawn.requests() if trace is None else requests_of(trace)
    simulated = _simulated(model, replicas, config, drafts.speculating())
    pools = pools_of(replicas, simulated.spec, asked, config.tensor_parallel)
    started_s = time.perf_counter()
    report, fleet = _play(simulated.spec, asked, replicas, pools)
    took_s = time.perf_counter() - started_s
    load = classify_trace(simulated.spec, asked, report)
    count = replicas.count if pools is None else pools.prefill + pools.decode
    played = simulate_table.Played(report, objective, simulated, count, load, took_s, pools, fleet)
    if as_json:
        typer.echo(json.dumps(simulate_table.record(played), indent=1))
    else:
        simulate_table.show(played)


def _play(
    spec: ReplicaSpec, asked: list[TraceRequest], replicas: ReplicasWish, pools: FleetSpec | None
) -> tuple[SimulationReport, FleetReport | None]:
    from twostroke.planner.fleet.fleet import simulate_fleet
    from twostroke.planner.fleet.spec import FleetSpec
    from twostroke.planner.simulate import ROUTERS
    from twostroke.planner.simulate import simulate as play

    router = "least-loaded" if replicas.router == "auto" else replicas.router
    if pools is None and router in ROUTERS:
        return play(spec, asked, replicas=replicas.count, router=router), None
    fleet = simulate_fleet(pools or FleetSpec(spec, decode=replicas.count, router=router), asked)
    return fleet.simulation, None if pools is None else fleet


def _simulated(model: str, replicas: ReplicasWish, config: EngineConfig, speculating: Speculating | None) -> Simulated:
    kv = config.kv
    for flag, asked in (("--kv-host-gb", kv.host_gb), ("--kv-disk", kv.disk), ("--kv-disk-gb", kv.disk_gb)):
        if asked is not None:
            raise BadRequestError(f"{flag} is not simulated: what a device forgets is computed again; leave it out")
    if replicas.on == "this":
        return here(model, config, speculating)
    from twostroke.cli.simulate_device import on_device

    for name in ("backend", "threads", "dtype"):
        if getattr(config, name) != getattr(options.OWN, name):
            raise BadRequestError(f"--{name} goes with --on this: {replicas.on} is simulated by its data sheet alone")
    return on_device(model, replicas.on, config.tensor_parallel, config, speculating)


def here(model: str, config: EngineConfig, speculating: Speculating | None = None) -> Simulated:
    """The engine that this machine would run, at its calibrated cost."""
    from twostroke.cli.simulate_table import Simulated
    from twostroke.cost.known_shapes import find_known_shape
    from twostroke.cost.step_cost import StepCost
    from twostroke.engine.build import prepare_model
    from twostroke.planner.simulate import ReplicaSpec

    try:
        prepared = prepare_model(model, config)
    except ModelError as error:
        if find_known_shape(model) is None:
            raise
        raise ModelError(f"{error}; its shape is known: --on DEVICE (h200, ...) simulates it without weights") from None
    calibration = prepared.calibration()
    if calibration is None:
        cost = StepCost(prepared.shape, prepared.ceilings())
        source = f"typical efficiencies, error unknown: run `twostroke calibrate {model}` first for measured ones"
    else:
        cost = calibration.step_cost(prepared.shape)
        source = f"calibrated {calibration.taken}, steps off by {calibration.error:.1%} on average"
    itl_target_ms = prepared.resolved.sizes.itl_target_ms
    spec = ReplicaSpec(
        cost.seconds,
        prepared.shape,
        cost.ceilings,
        prepared.scheduler_config,
        prepared.resolved.layout,
        host_s=0.0 if calibration is None else calibration.host_s,
        newcomer_s=0.0 if calibration is None else calibration.newcomer_s,
        newcomer_s_per_token=0.0 if calibration is None else calibration.newcomer_s_per_token,
        itl_target_s=None if itl_target_ms is None else itl_target_ms / 1e3,
        speculating=speculating,
        policy=config.policy,
        levels=config.promised(),
    )
    note = None if speculating is None else speculating.note
    return Simulated(spec, f"{model} on {prepared.factory.name} ({prepared.device})", source, note)
