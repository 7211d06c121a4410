"""`twostroke plan`: will it fit, how fast, for how many users, at what price; nothing is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from twostroke.cli import options
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import SENT_EARLY
from twostroke.planner.asked.speculation import SpeculationWish
from twostroke.planner.asked.wish import DeploymentWish, LoadWish, Wish

if TYPE_CHECKING:
    from twostroke.cost.devices import Device
    from twostroke.planner.deployment import Deployment
    from twostroke.planner.efficiency import Efficiency

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name (Llama-3.1-70B, gpt-oss-120b, ...), a config.json, a folder, a .gguf file, or a Hub id, of "
        "which config.json alone is fetched.",
    ),
]
Search = Annotated[bool, typer.Option("--search", help="Find the cheapest deployment that meets the service level.")]
Disaggregate = Annotated[
    bool,
    typer.Option(
        "--disaggregate",
        help="One pool against two, one that reads and one that writes, on the same devices, simulated: the best "
        "split, what handing KV over costs, and from which prompt length, load and link on it pays.",
    ),
]
LinkName = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="GBPS|NAME",
        help="With --disaggregate, what each device hands KV over by: GB a second (50), 400Gbit, 100gbe, ndr, or a "
        "device's own (h200). Default: the device's, within one machine of eight, else 400gbe.",
    ),
]
EarlyKV = Annotated[
    bool,
    typer.Option(
        help="With --disaggregate: each chunk's KV goes while the next one is read, or all of it when the prompt was "
        "read. Default: as engines do."
    ),
]
FromServer = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Take efficiencies from the metrics of a server that runs this model on this device."
    ),
]
ApiKey = Annotated[str | None, typer.Option(envvar="TWOSTROKE_API_KEY", help="That server's key, if it asks for one.")]
Matrices = Annotated[
    bool, typer.Option("--matrices", help="Also show each matrix on the roofline, in prefill and in decode.")
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the least TPOT of all devices, the chosen one marked (extra [lab])."),
]
ANYWHERE, ANYBODY, NO_DRAFTS = DeploymentWish(), LoadWish(), SpeculationWish()


def plan(
    model: Model,
    asked: DeploymentWish = ANYWHERE,
    load: LoadWish = ANYBODY,
    drafts: SpeculationWish = NO_DRAFTS,
    decode_weights: Annotated[str, options.engine_option("decode_weights")] = "auto",
    policy: Annotated[str, options.engine_option("policy")] = options.OWN.policy,
    service_levels: Annotated[str | None, options.engine_option("service_levels")] = None,
    search: Search = False,
    disaggregate: Disaggregate = False,
    link: LinkName = None,
    early_kv: EarlyKV = SENT_EARLY,
    from_server: FromServer = None,
    api_key: ApiKey = None,
    matrices: Matrices = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Plot = None,
) -> None:
    """Plan hardware without loading anything: what fits, TTFT and TPOT, tokens a second, cost.

    \b
    PREFILL reads a prompt with every token at once: its time is arithmetic over FLOP/s. It is felt as TTFT.
    DECODE writes one token a step and reads all weights for it: bytes over bandwidth. It is felt as TPOT.
    A step of many users reads the weights once for all of them: cheaper for each token, slower for each user.

    \b
    Each number comes twice. The floor is the best that the data sheet allows, and no engine reaches it.
    "expected" uses the shares of it that were really reached. The last lines say where these were measured,
    and how far predictions made with them were off.

    \b
    --search shows what each user would feel at the load that you give, and what a token costs at it. With --rate
    the cheapest is simulated too, and has to meet the level for nine requests of ten. If nothing meets the
    level, it exits with 1 and shows the three that come nearest.

    \b
    twostroke plan Llama-3.1-70B --on h200 --tensor-parallel 2 --input 2000 --output 500 --users 64
    twostroke plan DeepSeek-V3 --on h200 --expert-parallel 16 --input 2000 --output 500
    twostroke plan gpt-oss-120b --search --users 200 --slo-ttft-ms 1000 --slo-tpot-ms 40
    twostroke plan smollm2 --on this --from-server http://localhost:8000
    twostroke plan Llama-3.1-70B --on h200 --plot decode.png
    twostroke plan Llama-3.1-8B --on h200 --users 16 --accept 0.7 --drafts 4
    twostroke plan Llama-3.1-8B --on h200 --count 8 --disaggregate --link ndr --input 4000 --output 200 --rate 60
    """
    from twostroke.config import EngineConfig
    from twostroke.planner.asked.model import read_model

    if plot is not None:
        from twostroke.planner.plots import check_plot_file

        check_plot_file(plot)
    # What it may be, each says itself.
    config = EngineConfig(decode_weights=decode_weights, policy=policy, service_levels=service_levels)  # type: ignore[arg-type]
    config.promised()  # a slip in the file is told before anything is planned
    if not (search or disaggregate) and (config.policy, config.service_levels) != (options.OWN.policy, None):
        raise BadRequestError("--policy and --service-levels belong to --search and --disaggregate, which simulate")
    load.lengths()  # checked before anything is read
    speculating = drafts.speculating()
    wish = Wish(read_model(model), asked, config, speculating)
    if link is not None and not disaggregate:
        raise BadRequestError("--link belongs to --disaggregate: one pool hands nothing over")
    if early_kv != SENT_EARLY and not disaggregate:
        raise BadRequestError("--early-kv belongs to --disaggregate: one pool hands nothing over")
    if disaggregate:
        if search or from_server is not None or matrices or plot is not None:
            raise BadRequestError("--disaggregate goes with no --search, --from-server, --matrices or --plot")
        _disaggregate(wish, load, link, early_kv, as_json)
    elif search:
        if asked.is_cut or from_server is not None or matrices or plot is not None:
            raise BadRequestError(
                "--search tries every cut and count itself: it goes with no parallelism, --count, --from-server, "
                "--matrices or --plot"
            )
        _search(wish, load, as_json)
    else:
        _estimate(wish, load, (from_server, api_key), matrices=matrices, as_json=as_json, plot=plot)


def _estimate(
    wish: Wish,
    load: LoadWish,
    server: tuple[str | None, str | None],
    *,
    matrices: bool,
    as_json: bool,
    plot: Path | None,
) -> None:
    """One deployment. `server`: whose metrics to go by, and its key."""
    from twostroke.cli import plan_table
    from twostroke.planner.asked.plan import deploy
    from twostroke.planner.estimate import estimate
    from twostroke.planner.record import record

    console = Console()
    deployment, own = deploy(wish, load)
    if server[0] is not None:
        own = _measured(console, deployment, server[0], server[1], as_json)
    if plot is not None:
        _plot(wish, plot, deployment.device)
    result = estimate(deployment, load.lengths(), users=load.users, efficiency=own)
    if as_json:
        _print_json(console, record(result))
        return
    plan_table.show(console, result)
    if matrices:
        plan_table.show_matrices(console, result)


def _measured(console: Console, deployment: Deployment, url: str, api_key: str | None, as_json: bool) -> Efficiency:
    """What a running server reaches."""
    from twostroke.cli import plan_table
    from twostroke.planner.live import calibrate, fetch_metrics

    calibrated = calibrate(deployment, fetch_metrics(url, api_key), f"the metrics of {url}")
    if not as_json:
        plan_table.show_calibration(console, calibrated)
    return calibrated.shares


def _search(wish: Wish, asked: LoadWish, as_json: bool) -> None:
    from twostroke.cli import plan_record, plan_table
    from twostroke.cost.devices import DEVICES, find_device
    from twostroke.planner.search import Load, candidates_of, search

    if wish.config.decode_weights == "packed":
        raise BadRequestError("--search compares devices that hold no copies too: --decode-weights auto or plain")
    lengths, level = asked.lengths(), asked.level()
    load = Load(requests_per_s=asked.rate, users=asked.users)
    own = wish.asked.own_efficiency()
    on, quantise = wish.asked.on, wish.asked.quantise
    named = [find_device(name) for name in on] if on else [one for one in DEVICES if one.price_per_hour_usd is not None]
    kinds = [quantise] if quantise else plan_table.kinds_to_try(wish.planned)
    bases = [wish.at(device, kind) for device in named for kind in kinds]
    found, rejected = search(candidates_of(bases), lengths, level, load, None if own is None else lambda _: own)
    tail, is_met = None, bool(found)
    if found and load.requests_per_s is not None:
        from twostroke.cli.plan_tail import confirmed

        found, tail, is_met = confirmed(found, lengths, level, load, wish.config)
    console = Console()
    if as_json:
        _print_json(console, plan_record.search_record(found, rejected, tail, is_met))
    else:
        plan_table.show_search(console, found, rejected, lengths, tail, is_met)
    if not is_met:
        raise typer.Exit(1)


def _disaggregate(wish: Wish, load: LoadWish, link: str | None, early_kv: bool, as_json: bool) -> None:
    from twostroke.cli import plan_pools

    console = Console()
    found = plan_pools.compared(wish, load, link, early_kv=early_kv)
    if as_json:
        _print_json(console, plan_pools.pools_plan(found))
    else:
        plan_pools.show(console, found)


def _plot(wish: Wish, path: Path, chosen: Device) -> None:
    from twostroke.cost.devices import DEVICES
    from twostroke.planner.plots import decode_points, plot_decode

    plain = replace(wish.config, decode_weights="plain")  # what devices are compared by
    alone = Wish(wish.planned, replace(wish.asked.uncut(), price=None), plain)
    points = decode_points([alone.at(device, wish.asked.quantise) for device in DEVICES])
    if not any(point.count for point in points):
        raise BadRequestError("no machine of eight devices in the table holds the model: there is nothing to draw")
    kept = alone.at(chosen, wish.asked.quantise).kept
    plot_decode(points, f"{wish.planned.name}, {kept}: every weight a token meets, read once", path, chosen)
    Console(stderr=True).print(f"plot: {path}", highlight=False, markup=False)


def _print_json(console: Console, record: dict[str, Any]) -> None:
    from twostroke.planner.record import as_json

    console.out(as_json(record), highlight=False)
