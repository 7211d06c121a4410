"""`twostroke plan --disaggregate`: one pool against two on the same devices, as a person reads it and as a program
does."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.cli import units
from twostroke.cli.plan_table import hardware
from twostroke.cli.simulate_device import replica_on
from twostroke.cli.simulate_pools import handoff_lines, link_asked, moves
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import SENT_EARLY
from twostroke.planner.asked.plan import DEFAULT_DEVICE, THIS
from twostroke.planner.asked.wish import LoadWish, Wish
from twostroke.planner.deployment import DEVICES_A_MACHINE, Deployment
from twostroke.planner.efficiency import Efficiency
from twostroke.planner.estimate import estimate, expected_of, phases_of
from twostroke.planner.fleet.compare import Comparer, Comparison, Split, Tried, where
from twostroke.planner.report import Objective

LOADED = 0.7
"""Of what the devices could serve in one pool, where neither a rate nor users are given."""
LEAST_COPIES = 2


@dataclass(frozen=True, slots=True)
class Compared:
    deployment: Deployment
    """Of all copies together."""
    efficiency: Efficiency
    comparison: Comparison

    def usd_per_thousand(self, split: Split) -> float | None:
        """Requests that met the objective."""
        price = self.deployment.price_per_hour_usd
        return None if price is None or not split.good_per_s else 1000 * price / 3600 / split.good_per_s


def compared(wish: Wish, load: LoadWish, link: str | None, *, early_kv: bool = SENT_EARLY) -> Compared:
    """On as many devices as were asked for; else on a machine full of them, or on two copies."""
    on = wish.asked.on or (DEFAULT_DEVICE,)
    if len(on) > 1 or on[0] == THIS:
        raise BadRequestError(
            "--disaggregate compares copies on one device of the table: one --on DEVICE. For this machine's engine "
            "there is `simulate --prefill N --decode M --link GBPS`"
        )
    deployment, _ = wish.on(on[0])
    if deployment.lanes > 1:
        raise BadRequestError("--disaggregate compares copies of one step at a time: no stages, no groups of experts")
    if wish.asked.count is None:
        copies = max(LEAST_COPIES, DEVICES_A_MACHINE // deployment.devices_per_copy)
        deployment = replace(deployment, replicas=copies)
    lengths = load.lengths()
    if not deployment.max_users(lengths.input_tokens + lengths.output_tokens):
        raise BadRequestError(
            f"{deployment.model} does not fit there: `twostroke plan` without --disaggregate says why"
        )
    efficiency = wish.asked.own_efficiency() or expected_of(deployment)
    rate = load.rate
    if rate is None:
        company = estimate(deployment, lengths, users=load.users, efficiency=efficiency).company
        assert company is not None  # it fits
        rate = company.expected.requests_per_s * (1.0 if load.users is not None else LOADED)
    limits_ms = (load.slo_ttft_ms, load.slo_tpot_ms)
    objective = Objective(*(None if value is None else value / 1e3 for value in limits_ms))
    joined = link_asked(link, on[0], deployment.num_devices).times(deployment.tensor_parallel)
    joined = replace(joined, is_early=early_kv)
    spec = replica_on(deployment, efficiency, wish.config)
    comparer = Comparer(spec, phases_of(deployment, efficiency), deployment.replicas, joined, objective)
    return Compared(deployment, efficiency, comparer.compare(lengths, rate))


def pools_plan(found: Compared) -> dict[str, Any]:
    comparison = found.comparison
    asked = comparison.asked
    return {
        "deployment": f"{found.deployment.model} in {found.deployment.kept} on {hardware(found.deployment)}",
        "lengths": asdict(asked.lengths),
        "requests_per_s": asked.requests_per_s,
        "objective": asdict(asked.objective),
        "link": comparison.link.name,
        "link_bytes_per_s": comparison.link.bytes_per_s,
        "early_kv": comparison.link.is_early,
        "simulated_requests": comparison.num_requests,
        "usd_per_hour": found.deployment.price_per_hour_usd,
        "pays": comparison.pays,
        "one_pool": _split_record(found, comparison.one),
        "two_pools": _split_record(found, comparison.best),
        "splits": [_split_record(found, split) for split in comparison.splits],
        "break_even": {
            "prompt_tokens": [_tried_record(one) for one in comparison.by_length],
            "requests_per_s": [_tried_record(one) for one in comparison.by_load],
            "link_gb_per_s": [_tried_record(one) for one in comparison.by_link],
        },
        "efficiency": {"source": found.efficiency.source, "error": found.efficiency.error},
        "measured": False,
    }


def _split_record(found: Compared, split: Split) -> dict[str, Any]:
    simulation = split.report.simulation
    return {
        "prefill": split.prefill,
        "decode": split.decode,
        "ttft_s": simulation.ttft_s,
        "itl_s": simulation.itl_s,
        "tpot_s": simulation.tpot_s,
        "met_share": split.met_share,
        "goodput_per_s": split.good_per_s,
        "output_tokens_per_s": simulation.output_tokens_per_s,
        "usd_per_thousand_good_requests": found.usd_per_thousand(split),
        "handoffs": asdict(split.report.handoffs) if split.prefill else None,
    }


def _tried_record(tried: Tried) -> dict[str, Any]:
    return {**asdict(tried), "pays": tried.pays}


def show(console: Console, found: Compared) -> None:
    comparison = found.comparison
    deployment, asked = found.deployment, comparison.asked
    cached = f", {asked.lengths.cached_tokens:,} of them cached" if asked.lengths.cached_tokens else ""
    _line(
        console,
        f"{deployment.model} in {deployment.kept} on {hardware(deployment)}: {asked.requests_per_s:.2f} "
        f"requests a second of about {asked.lengths.input_tokens:,} tokens in{cached} and "
        f"{asked.lengths.output_tokens:,} out.",
    )
    console.print()
    console.print(_table(found))
    console.print()
    for line in sentences(found):
        _line(console, line)


def _line(console: Console, text: str) -> None:
    console.print(Text(text), highlight=False, soft_wrap=True)


def _table(found: Compared) -> Table:
    table = Table(box=None, pad_edge=False)
    titles = ("pools", "TTFT p50", "p99", "ITL p50", "p99", "as asked", "goodput", "USD/1,000 good")
    for title in titles:
        table.add_column(title, justify="left" if title == "pools" else "right")
    comparison = found.comparison
    for split in (comparison.one, *comparison.splits):
        simulation, price = split.report.simulation, found.usd_per_thousand(split)
        named = f"{split.prefill} read, {split.decode} write" if split.prefill else f"one of {split.decode}"
        table.add_row(
            Text(named, style="bold" if split is comparison.best else ""),
            *(units.seconds(simulation.ttft_s.get(part)) for part in ("p50", "p99")),
            *(units.seconds(simulation.itl_s.get(part)) for part in ("p50", "p99")),
            f"{split.met_share:.1%}",
            f"{split.good_per_s:.2f}/s",
            "-" if price is None else f"{price:,.2f}",
        )
    return table


def sentences(found: Compared) -> list[str]:
    """The verdict, what it costs to hand over, and where the verdict turns."""
    comparison = found.comparison
    one, best, asked = comparison.one, comparison.best, comparison.asked
    verdict = "Two pools pay here" if comparison.pays else "Two pools do not pay here"
    ttft_s, tpot_s = asked.objective.ttft_s, asked.objective.tpot_s
    return [
        f"{verdict}: {best.prefill} that read and {best.decode} that write, the best split, serve {best.met_share:.1%} "
        f"of requests as asked, one pool of {one.decode} serves {one.met_share:.1%}. As asked is a first token within "
        f"{units.seconds(ttft_s)} and {units.seconds(tpot_s)} a token after it, on average.",
        _tails(one, best),
        *handoff_lines(comparison.link, best.report),
        f"By prompt length, at as much load on the devices, two pools pay "
        f"{where(comparison.by_length, lambda value: f'{value:,.0f} tokens')}.",
        f"By load they pay {where(comparison.by_load, lambda value: f'{value:.2f} requests a second')}.",
        f"By link they pay {where(comparison.by_link, lambda value: f'{value:g} GB/s')}.",
        f"This is a model and not a measurement: {comparison.num_requests} random arrivals for each row, played by the "
        f"engine's scheduler on a virtual clock. Steps: {found.efficiency.source}; error: {found.efficiency.error}. "
        f"The link has its line rate, and {moves(comparison.link)}.",
    ]


def _tails(one: Split, best: Split) -> str:
    def at(split: Split, name: str) -> str:
        times: dict[str, float] = getattr(split.report.simulation, name)
        return units.seconds(times.get("p99"))

    return (
        f"At the 99th percentile a first token takes {at(best, 'ttft_s')} in two pools and {at(one, 'ttft_s')} in one, "
        f"a gap between tokens {at(best, 'itl_s')} and {at(one, 'itl_s')}."
    )
