"""A thousand replicas in two pools, simulated: routing by prefix, replicas that fail, and a surge that the policy adds
more replicas for. `python -m bench.fleet_simulation` prints what came of it and how much processor time of one core it
took, writes bench/results/fleet-thousand.json and draws docs/plots/fleet-replicas.svg and docs/plots/fleet-ttft.svg.
The scheduler of every replica is the real one."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from bench.fleet_day import PolicyScaler
from bench.line_chart import Line, chart
from bench.readme import RESULTS, ROOT
from twostroke.cli.simulate_device import on_device
from twostroke.cluster.autoscale import Bounds, Rules
from twostroke.config import EngineConfig
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.planner.fleet.fleet import simulate_fleet
from twostroke.planner.fleet.link import find_link
from twostroke.planner.fleet.report import Felt, FleetReport
from twostroke.planner.fleet.spec import Failure, FleetSpec
from twostroke.planner.report import percentiles
from twostroke.planner.simulate import ReplicaSpec
from twostroke.planner.trace import Lengths, TraceRequest

LEVELS = ServiceLevels((ServiceLevel(DEFAULT_LEVEL, ttft_s=3.0, itl_s=0.05),))
PREFIXES, PREFIX_TOKENS = 2000, 2048
"""Beginnings that prompts share, each as long; the n-th is asked for 1/n as often as the first."""
PREFILL_SHARE = 5 / 18
"""Of all replicas."""
PREFILL, DECODE = "#c2500a", "#0b6fb3"
BUCKET_S = 5.0
THIRDS = ("before", "surge", "behind")


@dataclass(frozen=True, slots=True)
class Surge:
    """A rate that rises by half at once, for the middle third."""

    replicas: int = 1000
    """Those that the fleet begins with, as many as the rate before the surge needs."""
    ahead: float = 1.0
    """It begins with so many times these instead, and the load is the same."""
    per_replica_per_s: float = 0.55
    duration_s: float = 75.0
    surge_factor: float = 1.5
    failing_share: float = 0.02
    """Of the replicas, in all this time."""
    seed: int = 0

    @property
    def may_have(self) -> int:
        """Replicas of each pool at most."""
        return 2 * self.replicas

    @property
    def pools(self) -> tuple[int, int]:
        """Replicas that read, and that write, at the beginning."""
        number = round(self.replicas * self.ahead)
        prefill = max(1, round(PREFILL_SHARE * number))
        return prefill, max(1, number - prefill)

    def rate_at(self, moment_s: float) -> float:
        return self.replicas * self.per_replica_per_s * self._factor_at(moment_s)

    def _factor_at(self, moment_s: float) -> float:
        return self.surge_factor if self.duration_s / 3 <= moment_s < 2 * self.duration_s / 3 else 1.0

    def trace(self) -> list[TraceRequest]:
        generator = random.Random(self.seed)
        most = self.replicas * self.per_replica_per_s * self.surge_factor
        weights = [1.0 / (number + 1) for number in range(PREFIXES)]
        own, answers = Lengths(400, 6000), Lengths(200, 800)
        now_s, moments = 0.0, []
        while (now_s := now_s + generator.expovariate(most)) < self.duration_s:
            if generator.random() * most < self.rate_at(now_s):
                moments.append(now_s)
        chosen = generator.choices(range(PREFIXES), weights, k=len(moments))
        return [
            TraceRequest(
                moment_s,
                PREFIX_TOKENS + own.draw(generator),
                answers.draw(generator),
                f"prefix-{number}",
                PREFIX_TOKENS,
            )
            for moment_s, number in zip(moments, chosen, strict=True)
        ]

    def broken(self) -> tuple[Failure, ...]:
        generator = random.Random(self.seed + 1)
        return tuple(
            Failure(
                generator.uniform(0.2, 0.8) * self.duration_s,
                generator.choice(("prefill", "decode")),
                generator.randrange(self.replicas),
            )
            for _ in range(max(1, round(self.failing_share * self.replicas)))
        )


def replica(step_factor: float = 1.0) -> ReplicaSpec:
    """Llama-3.1-70B in 8 bits on an H200, by its data sheet and what was measured of others there. `step_factor`: times
    the seconds of a step that are predicted by that, to see what an error of them does."""
    spec = on_device("Llama-3.1-70B", "h200", 1, EngineConfig(quantise="fp8")).spec
    return replace(spec, levels=LEVELS, step_seconds=lambda work: step_factor * spec.step_seconds(work))


def fleet_of(surge: Surge, router: str = "prefix", step_factor: float = 1.0) -> FleetSpec:
    prefill, decode = surge.pools
    return FleetSpec(
        replica(step_factor),
        decode,
        prefill,
        find_link("ndr"),
        router,
        tick_s=0.25,
        start_s=15.0,
        look_s=5.0,
        failures=surge.broken(),
        seed=surge.seed,
    )


def played(
    surge: Surge, trace: Sequence[TraceRequest], router: str = "prefix", step_factor: float = 1.0
) -> FleetReport:
    rules = Rules(start_s=15.0, settle_s=10.0, hold_s=60.0, idle_s=60.0)
    fleet = fleet_of(surge, router, step_factor)
    return simulate_fleet(fleet, trace, PolicyScaler(Bounds(1, surge.may_have), rules))


def by_third(surge: Surge, felt: Felt) -> dict[str, dict[str, int]]:
    """Of those served that came before the surge, in it and behind it: whose first token was late, and whose gaps alone
    were long."""
    ttft_s = LEVELS.named(DEFAULT_LEVEL).ttft_s or inf
    thirds = {name: {"served": 0, "late": 0, "long_gaps": 0} for name in THIRDS}
    for arrival_s, first_s, is_kept in zip(felt.arrival_s, felt.ttft_s, felt.is_kept, strict=True):
        third = thirds[THIRDS[min(2, int(3 * arrival_s / surge.duration_s))]]
        third["served"] += 1
        third["late"] += first_s > ttft_s
        third["long_gaps"] += first_s <= ttft_s and not is_kept
    return thirds


def record(surge: Surge, trace: Sequence[TraceRequest], report: FleetReport) -> dict[str, Any]:
    felt, by_time = report.felt, dict[int, list[float]]()
    for arrival_s, ttft_s in zip(felt.arrival_s, felt.ttft_s, strict=True):
        by_time.setdefault(int(arrival_s / BUCKET_S), []).append(ttft_s)
    handoffs, simulation = report.handoffs, report.simulation
    return {
        "requests": len(trace),
        "prefixes": PREFIXES,
        "served": len(felt.ttft_s),
        "kept_share": report.kept_share,
        **by_third(surge, felt),
        "ttft_s": simulation.ttft_s,
        "itl_s": simulation.itl_s,
        "most_replicas": max((one.prefill + one.decode for one in report.moments), default=0),
        "replica_hours": report.replica_hours,
        "busy_share": simulation.busy_share,
        "prefix_hit_share": simulation.prefix_hit_tokens / max(1, sum(one.prefix_tokens for one in trace)),
        "failures": report.num_failures,
        "sent_again": report.num_sent_again,
        "broken": report.num_broken,
        "handoffs": handoffs.number,
        "stayed": handoffs.num_kept,
        "handoff_bytes_mean": handoffs.mean_bytes,
        "handoff_exposed_s": handoffs.exposed_s,
        "moments": [[one.moment_s, one.prefill, one.decode] for one in report.moments],
        "ttft_by_time": [[BUCKET_S * place, *percentiles(by_time[place]).values()] for place in sorted(by_time)],
    }


def pictures(found: dict[str, Any]) -> dict[str, str]:
    replicas = [
        Line("prefill", PREFILL, [(row[0], row[1]) for row in found["moments"]]),
        Line("decode", DECODE, [(row[0], row[2]) for row in found["moments"]]),
    ]
    times = [
        Line(name, colour, [(row[0], row[place]) for row in found["ttft_by_time"]], is_dashed=place == 3)
        for place, name, colour in ((1, "p50", DECODE), (2, "p90", PREFILL), (3, "p99", PREFILL))
    ]
    return {
        "fleet-replicas.svg": chart(
            f"Replicas while a surge passes; {found['failures']} fail", "second", "replicas", replicas
        ),
        "fleet-ttft.svg": chart("Time to the first token, by arrival", "second", "seconds", times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000, help="With which it begins; the load is by these.")
    parser.add_argument(
        "--ahead", type=float, default=1.0, help="Begin with so many times these; the load is the same."
    )
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--router", default="prefix")
    parser.add_argument("--steps", type=float, default=1.0, help="Times the seconds that are predicted of a step.")
    parser.add_argument("--no-files", action="store_true", help="Print alone.")
    asked = parser.parse_args()
    surge = Surge(replicas=asked.replicas, ahead=asked.ahead, duration_s=asked.seconds)
    trace = surge.trace()
    started_s = time.process_time()
    report = played(surge, trace, asked.router, asked.steps)
    processor_s = time.process_time() - started_s
    begins = {"begins_with": sum(surge.pools), "each_pool_may_have": surge.may_have}
    found = {**begins, "processor_s": round(processor_s, 1), **record(surge, trace, report)}
    for name, value in found.items():
        if not isinstance(value, list):
            print(f"{name:20} {value}")
    if not asked.no_files:
        (RESULTS / "fleet-thousand.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        for name, text in pictures(found).items():
            (ROOT / "docs" / "plots" / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
