"""`twostroke plan`: will it fit, how fast, for how many users, at what price; nothing is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from twostroke.cli import options
from twostroke.core.errors import BadRequestError

if TYPE_CHECKING:
    from twostroke.cli.plan_model import PlannedModel
    from twostroke.config import EngineConfig
    from twostroke.cost.classify import RequestLengths
    from twostroke.cost.devices import Device
    from twostroke.planner.deployment import Deployment
    from twostroke.planner.efficiency import Efficiency
    from twostroke.planner.search import Load, ServiceLevel

MAX_PRICE = 1e5


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name (Llama-3.1-70B, gpt-oss-120b, ...), a config.json, a folder, a .gguf file, or a Hub id, of "
            "which config.json alone is fetched.",
        ),
    ],
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="h200 (the default), rtx4090, mi300x, m4max, ...; this: the machine under us, measured. "
            "With --search it may be given several times; default there: all with a public price.",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(help="Devices that share one copy of the model; each holds a part of every matrix.")
    ] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option(help="Stages of one copy, each with its part of the layers, one after another.")
    ] = 1,
    expert_parallel: Annotated[
        int,
        typer.Option(help="Groups of one copy, each with its part of the experts, all the rest, and users of its own."),
    ] = 1,
    count: Annotated[
        int | None, typer.Option(help="Devices in all: a multiple of what a copy takes, the rest are further copies.")
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="bf16, fp8, int8, int4, nvfp4, mxfp4, q8_0, q4_k or another GGUF kind; default: as stored.",
        ),
    ] = None,
    kv: Annotated[str, typer.Option(metavar="KIND", help="What K and V are kept in: bf16, f16, fp8 or int8.")] = "bf16",
    decode_weights: Annotated[str, options.engine_option("decode_weights")] = "auto",
    input_tokens: Annotated[int, typer.Option("--input", help="Tokens of a prompt.")] = 2000,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens of an answer.")] = 500,
    cached_tokens: Annotated[
        int, typer.Option("--cached", help="Tokens of a prompt that all users share and the prefix cache holds.")
    ] = 0,
    users: Annotated[
        int | None, typer.Option(help="Users at once, each asking again when answered; default: as many as fit.")
    ] = None,
    price: Annotated[float | None, typer.Option(help="USD an hour of one device; default: the table's.")] = None,
    efficiency: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE[,SHARE]",
            help="Your own share of the floor, of both phases or of prefill and decode: 0.6 or 0.5,0.8.",
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Find the cheapest deployment that meets the service level.")
    ] = False,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="With --search: mean time to first token, at most.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="With --search: mean time per token, at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="With --search: requests a second, instead of --users.")] = None,
    from_server: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Take efficiencies from the metrics of a server that runs this model on this device."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="That server's key, if it asks for one.")
    ] = None,
    matrices: Annotated[
        bool, typer.Option("--matrices", help="Also show each matrix on the roofline, in prefill and in decode.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the least TPOT of all devices, the chosen one marked (extra [lab])."),
    ] = None,
) -> None:
    """Plan hardware without loading anything: what fits, TTFT and TPOT, tokens a second, cost.

    \b
    PREFILL reads a prompt with every token at once: its time is arithmetic over FLOP/s. It is felt as TTFT.
    DECODE writes one token a step and reads all weights for it: bytes over bandwidth. It is felt as TPOT.
    A step of many users reads the weights once for all of them: cheaper for each token, slower for each user.

    \b
    Each number comes twice. The floor is what the data sheet allows at best and nobody reaches; "expected" is
    what shares of it were really reached, and the last lines say where that was measured and how far
    predictions made with it were off.

    \b
    --search shows what each user would feel at the load that you give, and what a token costs at it. With --rate
    the cheapest is simulated too, and has to meet the level for nine requests of ten. Where nothing meets the
    level it exits with 1, and shows the three that come nearest.

    \b
    twostroke plan Llama-3.1-70B --on h200 --tensor-parallel 2 --input 2000 --output 500 --users 64
    twostroke plan DeepSeek-V3 --on h200 --expert-parallel 16 --input 2000 --output 500
    twostroke plan gpt-oss-120b --search --users 200 --slo-ttft-ms 1000 --slo-tpot-ms 40
    twostroke plan smollm2 --on this --from-server http://localhost:8000
    twostroke plan Llama-3.1-70B --on h200 --plot decode.png
    """
    from twostroke.cli import plan_record, plan_table
    from twostroke.cli.plan_model import read_model
    from twostroke.config import EngineConfig
    from twostroke.planner.estimate import checked_lengths, estimate

    if plot is not None:
        from twostroke.planner.plots import check_plot_file

        check_plot_file(plot)
    lengths = checked_lengths(input_tokens, output_tokens, cached_tokens)
    if price is not None and not 0 < price <= MAX_PRICE:
        raise BadRequestError(f"price must be above 0 and at most {MAX_PRICE:g} USD an hour, not {price:g}")
    config = EngineConfig(decode_weights=decode_weights)  # type: ignore[arg-type]  # it says itself what it may be
    planned = read_model(model)
    cut = (tensor_parallel, pipeline_parallel, expert_parallel)
    wish = _Wish(planned, quantise, kv, cut, count, price, config)
    own = _own_efficiency(efficiency)
    console, notes = Console(), Console(stderr=True)
    if search:
        if max(*wish.cut, count or 1) > 1 or from_server is not None or matrices or plot is not None:
            raise BadRequestError(
                "--search tries every cut and count itself: it goes with no parallelism, --count, --from-server, "
                "--matrices or --plot"
            )
        if decode_weights == "packed":
            raise BadRequestError("--search compares devices that hold no copies too: --decode-weights auto or plain")
        level = _level(slo_ttft_ms, slo_tpot_ms)
        _search(console, wish, on, lengths, level, _load(rate, users), own, as_json)
        return
    if len(on or ()) > 1:
        raise BadRequestError("one --on at a time, or --search to compare several devices")
    if rate is not None or slo_ttft_ms is not None or slo_tpot_ms is not None:
        raise BadRequestError("--rate, --slo-ttft-ms and --slo-tpot-ms belong to --search")
    deployment, fitted = wish.on(on[0] if on else "h200")
    own = own or fitted
    if from_server is not None:
        from twostroke.planner.live import calibrate, fetch_metrics

        calibrated = calibrate(deployment, fetch_metrics(from_server, api_key), f"the metrics of {from_server}")
        own = calibrated.shares
        if not as_json:
            plan_table.show_calibration(console, calibrated)
    if plot is not None:
        _plot(notes, wish, plot, deployment.device)
    result = estimate(deployment, lengths, users=users, efficiency=own)
    if as_json:
        console.out(json.dumps(plan_record.record(result), indent=2), highlight=False)
    else:
        plan_table.show(console, result)
        if matrices:
            plan_table.show_matrices(console, result)


@dataclass(frozen=True, slots=True)
class _Wish:
    """What was asked for, but for the device."""

    planned: PlannedModel
    quantise: str | None
    kv: str
    cut: tuple[int, int, int]
    """Tensor, pipeline, expert parallelism."""
    count: int | None
    price: float | None
    config: EngineConfig
    """Of the engine that is planned."""

    def on(self, name: str) -> tuple[Deployment, Efficiency | None]:
        if name == "this":
            from twostroke.cli.plan_here import here

            return here(self.planned, self.quantise, self.kv, math.prod(self.cut), self.config)
        from twostroke.cost.devices import find_device

        deployment = self.at(find_device(name), self.quantise or self.planned.weights)
        a_copy = deployment.devices_per_copy
        count = a_copy if self.count is None else self.count
        if count < 1 or count % a_copy:
            raise BadRequestError(f"count ({count}) must be a multiple of the {a_copy} devices of a copy, at least one")
        return replace(deployment, replicas=count // a_copy), None

    def at(self, device: Device, quantise: str) -> Deployment:
        from twostroke.cli.plan_decode import with_decode_weights
        from twostroke.core.formats import Formats, find_kv_bits
        from twostroke.planner.deployment import Deployment

        if self.price is not None:
            device = replace(device, price_per_hour_usd=self.price)
        own_shape = None if self.quantise else self.planned.file_shape(find_kv_bits(self.kv))
        deployment = Deployment(
            model=self.planned.name,
            dimensions=self.planned.dimensions,
            device=device,
            formats=Formats.of(quantise, self.kv),
            tensor_parallel=self.cut[0],
            pipeline_parallel=self.cut[1],
            expert_parallel=self.cut[2],
            own_shape=own_shape,
        )
        arithmetic = "bf16" if self.quantise else self.planned.arithmetic
        return with_decode_weights(deployment, self.planned, arithmetic, self.config)


def _own_efficiency(text: str | None) -> Efficiency | None:
    if text is None:
        return None
    from twostroke.planner.efficiency import FloorShares

    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) not in (1, 2) or not all(0 < share <= 1 for share in shares):
        raise BadRequestError(
            f"efficiency must be one or two numbers above 0, at most 1, like 0.5,0.8, not {text[:40]!r}"
        )
    return FloorShares(
        "as given with --efficiency", "unknown: it was given, not measured", prefill=shares[0], decode=shares[-1]
    )


def _level(ttft_ms: float | None, tpot_ms: float | None) -> ServiceLevel:
    from twostroke.planner.search import ServiceLevel

    return ServiceLevel(*(math.inf if value is None else value / 1e3 for value in (ttft_ms, tpot_ms)))


def _load(rate: float | None, users: int | None) -> Load:
    from twostroke.planner.search import Load

    return Load(requests_per_s=rate, users=users)


def _search(
    console: Console,
    wish: _Wish,
    on: list[str] | None,
    lengths: RequestLengths,
    level: ServiceLevel,
    load: Load,
    own: Efficiency | None,
    as_json: bool,
) -> None:
    from twostroke.cli import plan_record, plan_table
    from twostroke.cost.devices import DEVICES, find_device
    from twostroke.planner.search import candidates_of, search

    named = [find_device(name) for name in on] if on else [one for one in DEVICES if one.price_per_hour_usd is not None]
    kinds = [wish.quantise] if wish.quantise else plan_table.kinds_to_try(wish.planned.weights)
    bases = [replace(wish, cut=(1, 1, 1)).at(device, kind) for device in named for kind in kinds]
    found, rejected = search(candidates_of(bases), lengths, level, load, None if own is None else lambda _: own)
    tail, is_met = None, bool(found)
    if found and load.requests_per_s is not None:
        from twostroke.cli.plan_tail import confirmed

        found, tail, is_met = confirmed(found, lengths, level, load)
    if as_json:
        record = plan_record.search_record(found, rejected, tail, is_met)
        console.out(json.dumps(record, indent=2), highlight=False)
    else:
        plan_table.show_search(console, found, rejected, lengths, tail, is_met)
    if not is_met:
        raise typer.Exit(1)


def _plot(notes: Console, wish: _Wish, path: Path, chosen: Device) -> None:
    from twostroke.cost.devices import DEVICES
    from twostroke.planner.plots import decode_points, plot_decode

    plain = replace(wish.config, decode_weights="plain")  # what devices are compared by
    alone = replace(wish, cut=(1, 1, 1), price=None, config=plain)
    kind = wish.quantise or wish.planned.weights
    points = decode_points([alone.at(device, kind) for device in DEVICES])
    if not any(point.count for point in points):
        raise BadRequestError("no machine of eight devices in the table holds the model: there is nothing to draw")
    plot_decode(points, f"{wish.planned.name}, {kind}: every weight a token meets, read once", path, chosen)
    notes.print(f"plot: {path}", highlight=False, markup=False)
