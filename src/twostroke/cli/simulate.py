"""`twostroke simulate`: serve a trace that never came on replicas that do not exist, with the real scheduler, and say
what its users would have felt."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from twostroke.cli import options, units
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError, ModelError

if TYPE_CHECKING:
    from twostroke.cost.classify import WorkloadClass
    from twostroke.planner.report import Objective, SimulationReport
    from twostroke.planner.simulate import ReplicaSpec
    from twostroke.planner.trace import TraceRequest

MAX_REPLICAS = 1000
TIMES = {
    "ttft_s": ("TTFT", "arrival to the first token"),
    "queue_s": ("queue", "of it, waiting to be admitted"),
    "itl_s": ("ITL", "from one token to the next"),
    "tpot_s": ("TPOT", "mean over an answer's tokens after the first"),
}


@dataclass(frozen=True, slots=True)
class Simulated:
    """What is simulated, and where the seconds of its steps come from."""

    spec: ReplicaSpec
    title: str
    source: str
    note: str | None = None


def simulate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A short name (smollm2), a .gguf file, a Hugging Face folder, or a Hub id (org/name); with --on "
            "DEVICE also a name of the plan's (Llama-3.1-70B, gpt-oss-120b, ...) or a config.json.",
        ),
    ],
    on: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="this: the engine of this machine, calibrated; or a device of the plan's table: h200.",
        ),
    ] = "this",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share one replica; with --on DEVICE.")] = 1,
    rate: Annotated[float, typer.Option(help="Requests a second, on average, in random arrivals.")] = 1.0,
    requests: Annotated[int, typer.Option(help="How many requests arrive.")] = 1000,
    prompt: Annotated[str, typer.Option("--input", metavar="N|A-B", help="Prompt tokens: 500, or 200-2000.")] = "500",
    output: Annotated[str, typer.Option(metavar="N|A-B", help="Tokens of an answer, likewise.")] = "200",
    burst: Annotated[int, typer.Option(help="How many arrive at once; the rate stays the same on the whole.")] = 1,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A file instead: a JSON object a line with arrival_s, prompt_tokens, output_tokens and, where prompts "
            "begin alike, prefix (a name) and prefix_tokens."
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(help="Engines side by side.")] = 1,
    router: Annotated[
        str, typer.Option(help="Who gets the next request: least-loaded, or round-robin.")
    ] = "least-loaded",
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="A request is good if its first token comes by then,")
    ] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="and each further one takes no longer on average.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same arrivals and lengths.")] = 0,
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
    """
    from twostroke.planner.report import Objective
    from twostroke.planner.simulate import classify_trace
    from twostroke.planner.simulate import simulate as play

    if not 1 <= replicas <= MAX_REPLICAS:
        raise BadRequestError(f"replicas must be from 1 to {MAX_REPLICAS}, not {replicas}")
    objective = Objective(_limit("slo-ttft-ms", slo_ttft_ms), _limit("slo-tpot-ms", slo_tpot_ms))
    asked = _trace(trace, rate, requests, prompt, output, burst, seed)
    if on == "this":
        if tensor_parallel != 1:
            raise BadRequestError("--tensor-parallel goes with --on DEVICE: this engine runs a replica on one device")
        simulated = here(model, config)
    else:
        from twostroke.cli.simulate_device import on_device

        for name, is_given in (
            ("backend", config.backend != "auto"),
            ("threads", config.threads is not None),
            ("dtype", config.dtype != "auto"),
        ):
            if is_given:
                raise BadRequestError(f"--{name} goes with --on this: {on} is simulated by its data sheet alone")
        simulated = Simulated(*on_device(model, on, tensor_parallel, config))
    started_s = time.perf_counter()
    report = play(simulated.spec, asked, replicas=replicas, router=router)
    took_s = time.perf_counter() - started_s
    load = classify_trace(simulated.spec, asked, report)
    if as_json:
        typer.echo(json.dumps(record(report, objective, simulated, replicas, load), indent=1))
    else:
        _show(report, objective, simulated, replicas, load, took_s)


def _limit(name: str, milliseconds: float | None) -> float | None:
    if milliseconds is not None and not 0.0 < milliseconds < float("inf"):
        raise BadRequestError(f"{name} must be a number above 0, not {milliseconds}")
    return None if milliseconds is None else milliseconds / 1e3


def _trace(
    path: Path | None, rate: float, requests: int, prompt: str, output: str, burst: int, seed: int
) -> list[TraceRequest]:
    from twostroke.planner.trace import Lengths, bursts, read_trace

    if path is None:
        return bursts(rate, requests, Lengths.parse(prompt), Lengths.parse(output), burst=burst, seed=seed)
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines)
    except OSError as error:
        raise BadRequestError(f"the trace {path} could not be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequestError(f"the trace {path} is not text") from None


def here(model: str, config: EngineConfig) -> Simulated:
    """The engine that this machine would run, at its calibrated cost."""
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
    )
    return Simulated(spec, f"{model} on {prepared.factory.name} ({prepared.device})", source)


def record(
    report: SimulationReport, objective: Objective, simulated: Simulated, replicas: int, load: WorkloadClass | None
) -> dict[str, Any]:
    share, per_s = report.goodput(objective)
    return {
        "deployment": simulated.title,
        "replicas": replicas,
        "step_seconds": simulated.source,
        "note": simulated.note,
        "requests": len(report.served.ttft_s),
        "refused": report.num_refused,
        "duration_s": report.duration_s,
        "requests_per_s": report.requests_per_s,
        "output_tokens_per_s": report.output_tokens_per_s,
        "busy_share": report.busy_share,
        "preemptions": report.num_preemptions,
        "prefix_hit_tokens": report.prefix_hit_tokens,
        **{name: getattr(report, name) for name in TIMES},
        "goodput": {
            "ttft_s": objective.ttft_s,
            "tpot_s": objective.tpot_s,
            "share": share,
            "requests_per_s": per_s,
        },
        "load": None
        if load is None
        else {
            "bound": load.bound,
            "prefill_share": load.prefill_share,
            "mean_streams": load.batch,
            "advice": list(load.advice),
        },
    }


def _show(
    report: SimulationReport,
    objective: Objective,
    simulated: Simulated,
    replicas: int,
    load: WorkloadClass | None,
    took_s: float,
) -> None:
    console, served = Console(), report.served
    table = Table(box=None, pad_edge=False)
    table.add_column("felt")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name, (title, meaning) in TIMES.items():
        values = getattr(report, name)
        table.add_row(title, *(units.seconds(values.get(part)) for part in ("p50", "p90", "p99")), meaning)
    console.print(table)
    lines = [
        f"{len(served.ttft_s):,} requests in {units.seconds(report.duration_s)}: {report.requests_per_s:.2f} a second, "
        f"{report.output_tokens_per_s:,.0f} output tokens/s, replicas busy {report.busy_share:.0%} of the time"
        + (f", {report.num_preemptions:,} preemptions" if report.num_preemptions else "")
        + (f", {report.num_refused:,} refused: too long" if report.num_refused else "")
        + "."
    ]
    if objective.ttft_s is not None or objective.tpot_s is not None:
        share, per_s = report.goodput(objective)
        lines.append(f"Goodput: {share:.1%} met the objective, {per_s:.2f} requests/s.")
    if load is not None:
        lines.append(f"Bound by {'both phases' if load.bound == 'balanced' else load.bound}: {load.reason}.")
        lines.extend(f"{'    ' if index else 'So: '}{advice}" for index, advice in enumerate(load.advice))
    lines.append(f"{replicas} x {simulated.title}. Seconds of a step: {simulated.source}.")
    if simulated.note is not None:
        lines.append(f"Note: {simulated.note}.")
    lines.append(
        f"Simulated in {units.seconds(took_s)}, {len(served.ttft_s) / max(took_s, 1e-9):,.0f} requests a second."
    )
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
