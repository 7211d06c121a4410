"""A simulated day of two pools that scale by the fleet's policy, beside an oracle that knows the day: how many promises
are kept, with how many replica-hours. `python -m bench.fleet_day` prints the figures, writes them to
bench/results/fleet-day.json and draws docs/plots/fleet-day.svg. No clock is read: equal code gives equal figures."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from bench.line_chart import Line, chart
from bench.readme import RESULTS, ROOT
from twostroke.cluster.autoscale import Bounds, Kind, PoolSignals, Rules, State, scale
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.cost.step_cost import StepCost
from twostroke.planner.fleet.fleet import simulate_fleet
from twostroke.planner.fleet.link import find_link
from twostroke.planner.fleet.member import Role
from twostroke.planner.fleet.report import FleetReport
from twostroke.planner.fleet.spec import FleetSpec, PoolLook
from twostroke.planner.simulate import ReplicaSpec
from twostroke.planner.trace import Lengths, TraceRequest
from twostroke.scheduling.config import SchedulerConfig

HOUR_S = 3600.0
INTERVAL_S = 900.0
WARM_UP_S: dict[Role, float] = {"prefill": 180.0, "decode": 450.0}
"""The oracle has a number of replicas for each interval, and plays some of what came before it to begin warm: prompts
are read within a minute or two, an answer is written for about five."""
STRETCH, FIRST_GUESS = 8, 4
"""A process has so many intervals at a time, and begins to look from so many replicas: figures do not depend on how
many processes there are."""
POOLS: tuple[Role, ...] = ("prefill", "decode")
KEPT = 0.99
PLENTY = 40
"""So many replicas of a pool that it never holds the other up."""
SHAPE = ModelShape(8 * 10**9, 7 * 10**9, 5 * 10**8, 15 * 10**9, 32, 128, (KVGroupShape(32, None, 131_072),))
CEILINGS = Ceilings(10e9, 0.2e12, "a small CPU machine")
LEVELS = ServiceLevels((ServiceLevel(DEFAULT_LEVEL, ttft_s=120.0, itl_s=3.0),))
SPEC = ReplicaSpec(
    StepCost(SHAPE, CEILINGS).seconds,
    SHAPE,
    CEILINGS,
    SchedulerConfig(max_context=4096, max_tokens_per_step=512, max_running=64),
    KVLayout(16, (KVGroup(tuple(range(32)), None, 4000),)),
    levels=LEVELS,
)
"""An 8B model on a machine that reads 10 GB a second: so slow that a day is few requests, and soon simulated."""
RULES = Rules(start_s=60.0)


@dataclass(frozen=True, slots=True)
class Day:
    hours: float = 24.0
    lowest_per_s: float = 0.05
    highest_per_s: float = 0.4
    bursts: int = 12
    burst_s: float = 120.0
    burst_factor: float = 1.6
    seed: int = 0

    def rate_at(self, moment_s: float, bursts: Sequence[float]) -> float:
        """Lowest at the beginning and the end, highest at noon; bursts on top."""
        share = (1.0 - math.cos(2 * math.pi * moment_s / (self.hours * HOUR_S))) / 2
        rate = self.lowest_per_s + share * (self.highest_per_s - self.lowest_per_s)
        return rate * (self.burst_factor if any(0 <= moment_s - one < self.burst_s for one in bursts) else 1.0)

    def trace(self) -> list[TraceRequest]:
        generator = random.Random(self.seed)
        end_s = self.hours * HOUR_S
        bursts = sorted(generator.uniform(0.0, end_s) for _ in range(self.bursts))
        prompts, answers = Lengths(200, 800), Lengths(50, 200)
        most, now_s, found = self.burst_factor * self.highest_per_s, 0.0, []
        while (now_s := now_s + generator.expovariate(most)) < end_s:
            if generator.random() * most < self.rate_at(now_s, bursts):
                found.append(TraceRequest(now_s, prompts.draw(generator), answers.draw(generator)))
        return found


class PolicyScaler:
    """The fleet's policy, in a simulation's place for whoever scales."""

    def __init__(self, bounds: Bounds | None = None, rules: Rules = RULES) -> None:
        self._bounds, self._rules, self._state = bounds or Bounds(1, PLENTY), rules, State()

    def __call__(self, moment_s: float, looks: Mapping[Role, PoolLook]) -> dict[Role, tuple[int, str]]:
        kinds: dict[Kind, Role] = {role: role for role in looks} if len(looks) > 1 else {"both": "decode"}
        pools = {
            kind: PoolSignals(looks[role].replicas, looks[role].starting, looks[role].held)
            for kind, role in kinds.items()
        }
        bounds = dict.fromkeys(pools, self._bounds)
        targets, self._state = scale(moment_s, pools, self._state, bounds, self._rules)
        return {kinds[kind]: (target.replicas, target.why) for kind, target in targets.items()}


def fleet_of(prefill: int, decode: int) -> FleetSpec:
    return FleetSpec(
        SPEC,
        decode,
        prefill,
        find_link("25gbe"),
        "least-backlog",
        may_stay=False,
        start_s=RULES.start_s,
        look_s=15.0,
        tick_s=0.5,
    )


def scaled(trace: Sequence[TraceRequest], rules: Rules = RULES, begin: tuple[int, int] = (2, 2)) -> FleetReport:
    return simulate_fleet(fleet_of(*begin), trace, PolicyScaler(rules=rules))


# The oracle


def part_of(trace: Sequence[TraceRequest], role: Role, began_s: float) -> list[TraceRequest]:
    """The requests of an interval, and those that warm it up. Who counts those that read lets nobody write: two tokens
    an answer, and no gap is ever long."""
    part = [one for one in trace if began_s - WARM_UP_S[role] <= one.arrival_s < began_s + INTERVAL_S]
    return part if role == "decode" else [replace(one, output_tokens=2) for one in part]


def kept_from(report: FleetReport, began_s: float) -> float:
    """Of the requests that came from then on, those whose promises were kept."""
    felt = report.felt
    kept = [is_kept for arrival_s, is_kept in zip(felt.arrival_s, felt.is_kept, strict=True) if arrival_s >= began_s]
    return sum(kept) / max(1, len(kept))


def least(role: Role, part: Sequence[TraceRequest], began_s: float, guess: int) -> int:
    """The fewest replicas of one pool that keep the promises of an interval, while the other pool has plenty."""

    def keeps(number: int) -> bool:
        spec = fleet_of(number, PLENTY) if role == "prefill" else fleet_of(PLENTY, number)
        return kept_from(simulate_fleet(spec, part), began_s) >= KEPT

    number = max(1, guess)
    if keeps(number):
        while number > 1 and keeps(number - 1):
            number -= 1
        return number
    while not keeps(number := number + 1):
        if number >= PLENTY:
            raise RuntimeError("the promises of this day cannot be kept by any number of replicas")
    return number


@dataclass(frozen=True, slots=True)
class Oracle:
    """In hindsight, interval by interval. Each pool is counted while the other has plenty, and no replica takes time to
    start or to drain: nobody keeps the promises with fewer."""

    began_s: tuple[float, ...]
    prefill: tuple[int, ...]
    decode: tuple[int, ...]

    @property
    def replica_hours(self) -> float:
        return sum(self.prefill + self.decode) * INTERVAL_S / HOUR_S


def oracle(trace: Sequence[TraceRequest], processes: int = 1) -> Oracle:
    began = [number * INTERVAL_S for number in range(math.ceil(trace[-1].arrival_s / INTERVAL_S))]
    stretches = [began[place : place + STRETCH] for place in range(0, len(began), STRETCH)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        jobs = {role: [pool.submit(_fewest, role, trace, stretch) for stretch in stretches] for role in POOLS}
        fewest = {role: [number for job in jobs[role] for number in job.result()] for role in POOLS}
    return Oracle(tuple(began), tuple(fewest["prefill"]), tuple(fewest["decode"]))


def _fewest(role: Role, trace: Sequence[TraceRequest], stretch: Sequence[float]) -> list[int]:
    """Interval by interval; each begins to look where the one before ended."""
    found: list[int] = []
    for began_s in stretch:
        part = part_of(trace, role, began_s)
        is_empty = all(one.arrival_s < began_s for one in part)
        found.append(1 if is_empty else least(role, part, began_s, found[-1] if found else FIRST_GUESS))
    return found


def record(day: Day, report: FleetReport, best: Oracle, num_requests: int) -> dict[str, object]:
    policy = [[one.moment_s, one.prefill, one.decode] for one in report.moments]
    return {
        "hours": day.hours,
        "requests": num_requests,
        "kept_share": report.kept_share,
        "ttft_s": report.simulation.ttft_s,
        "itl_s": report.simulation.itl_s,
        "replica_hours": report.replica_hours,
        "oracle_replica_hours": best.replica_hours,
        "ratio": report.replica_hours / best.replica_hours,
        "policy": policy[:: max(1, len(policy) // 600)],
        "oracle": [list(one) for one in zip(best.began_s, best.prefill, best.decode, strict=True)],
    }


def picture(found: Mapping[str, object]) -> str:
    lines = []
    for place, name, colour in ((1, "prefill", "#c2500a"), (2, "decode", "#0b6fb3")):
        rows: Sequence[Sequence[float]] = found["policy"]  # type: ignore[assignment]
        best: Sequence[Sequence[float]] = found["oracle"]  # type: ignore[assignment]
        lines.append(Line(f"{name}, policy", colour, [(row[0] / HOUR_S, row[place]) for row in rows]))
        steps = [(moment / HOUR_S, row[place]) for row in best for moment in (row[0], row[0] + INTERVAL_S)]
        lines.append(Line(f"{name}, oracle", colour, steps, is_dashed=True))
    return chart("Replicas over a simulated day with bursts", "hour", "replicas", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="That look for the oracle's numbers.")
    parser.add_argument("--no-files", action="store_true", help="Print alone.")
    asked = parser.parse_args()
    day = replace(Day(), hours=asked.hours, seed=asked.seed)
    trace = day.trace()
    report = scaled(trace)
    found = record(day, report, oracle(trace, asked.processes), len(trace))
    for name, value in found.items():
        if name not in ("policy", "oracle"):
            print(f"{name:22} {value}")
    if not asked.no_files:
        (RESULTS / "fleet-day.json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        (ROOT / "docs" / "plots" / "fleet-day.svg").write_text(picture(found), encoding="utf-8")


if __name__ == "__main__":
    main()
