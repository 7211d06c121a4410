"""What promises are kept at which load: `fifo` with constant chunks beside the default policy, on the same traces.

    python bench/promises.py [--quick] [--parts rate,flood,newcomer] [--on h200,cpu]

rate: a mixed trace (chats, documents, bursts of one tenant that floods) at ever more requests a second: the most at
which p99 TTFT and p99 ITL of every class are as promised. Of `fifo` the best of several constant chunks counts. flood:
one tenant sends far more than its share, beside the same requests of quiet tenants with and without it: what these feel
of it, and between which bounds that lies. newcomer: 8 streams write, and a prompt of 4k comes; a gap may be twice as
long as without it.

On the simulated H200 chats have 100 to 600 tokens, documents 3k to 12k. On the CPU prompts and answers are shorter:
in ten minutes a part then has hundreds of requests, so that a p99 is more than the one that was worst. Its plays are
several, with a trace each; all sides of a trace are played one after another."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from bench.promise_players import Answered, Real, Simulated, Way
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.planner.report import percentiles
from twostroke.planner.trace import TraceRequest

DERIVED = ServiceLevel("default", is_derived=True)
ON_H200 = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 0.5, 0.03), ServiceLevel("document", 3.0, 0.03), ServiceLevel("bulk", 20.0, 0.06))
)
ON_CPU = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 1.0, 0.15), ServiceLevel("document", 5.0, 0.15), ServiceLevel("bulk", 40.0, 0.3))
)
OURS = Way("fair")
FLOODER, QUIET_TENANTS, BURST_EVERY_S = "flood", 8, 10.0
RESAMPLED = 200
Player = Simulated | Real
Pair = tuple[Answered, Answered]
"""One request, without and with the flood."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a player is given to do."""

    chats: tuple[int, int]
    """The shortest and the longest prompt."""
    documents: tuple[int, int]
    answers: int
    """The longest; the shortest is a quarter of it."""
    fifo: tuple[Way, ...]
    """Constant chunks to compare with; in the flood the first."""
    rate_seconds: float
    first_rate: float
    num_halvings: int
    flood_seconds: float
    """Of each of the plays."""
    quiet_rate: float
    flood_rate: float
    num_plays: int = 1

    def quick(self) -> Load:
        return replace(
            self,
            fifo=self.fifo[:2],
            rate_seconds=self.rate_seconds / 3,
            num_halvings=min(1, self.num_halvings - 1),
            flood_seconds=self.flood_seconds / 4,
            num_plays=1,
        )


H200_LOAD = Load(
    (100, 600),
    (3000, 12_000),
    200,
    fifo=(Way("fifo", 512), Way("fifo", 256), Way("fifo", 1024), Way("fifo", 2048)),
    rate_seconds=120.0,
    first_rate=2.0,
    num_halvings=5,
    flood_seconds=400.0,
    quiet_rate=10.0,
    flood_rate=50.0,
)
CPU_LOAD = Load(
    (25, 150),
    (200, 800),
    32,
    fifo=(Way("fifo", 128), Way("fifo", 64)),
    rate_seconds=40.0,
    first_rate=2.0,
    num_halvings=2,
    flood_seconds=35.0,
    quiet_rate=2.5,
    flood_rate=8.0,
    num_plays=4,
)


def request(drawn: random.Random, at_s: float, tenant: str, level: str, load: Load) -> TraceRequest:
    lengths = load.documents if level == "document" else load.chats
    if level == "bulk":
        lengths = drawn.choice([load.chats, load.documents])
    num_tokens = drawn.randint(*lengths)
    answer = drawn.randint(load.answers // 4, load.answers)
    return TraceRequest(at_s, num_tokens, answer, tenant=tenant, service_level=level)


def mixed(rate: float, seconds: float, load: Load, *, bursts: bool, seed: int = 1) -> list[TraceRequest]:
    """Seven of ten are chats, one a document, and two come in bursts of the flooding tenant, where there are any."""
    drawn, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + drawn.expovariate(0.8 * rate)) < seconds:
        level = "document" if drawn.random() < 1 / 8 else "chat"
        found.append(request(drawn, at_s, f"quiet-{drawn.randrange(QUIET_TENANTS)}", level, load))
    for burst in range(int(seconds / BURST_EVERY_S) if bursts else 0):
        at_s = (burst + 0.5) * BURST_EVERY_S
        number = max(1, round(0.2 * rate * BURST_EVERY_S))
        found += [request(drawn, at_s, FLOODER, "bulk", load) for _ in range(number)]
    return sorted(found, key=lambda one: one.arrival_s)


def felt(answered: Sequence[Answered]) -> tuple[float, float]:
    """p99 TTFT and ITL."""
    ttft_s = percentiles(one.timing.ttft_s for one in answered if one.timing.ttft_s is not None)
    itl_s = percentiles(gap_s for one in answered for gap_s in one.timing.itl_s)
    return ttft_s.get("p99", 0.0), itl_s.get("p99", 0.0)


def of_level(answered: Sequence[Answered], level: str) -> list[Answered]:
    return [one for one in answered if one.request.service_level == level]


def is_kept(answered: Sequence[Answered], levels: ServiceLevels) -> bool:
    for level in levels.levels:
        if level.ttft_s is None or level.itl_s is None:
            continue
        ttft_s, itl_s = felt(of_level(answered, level.name))
        if ttft_s > level.ttft_s or itl_s > level.itl_s:
            return False
    return True


def searched(first: float, num_halvings: int) -> Generator[float, bool, float]:
    """Rates to be tried, each answered with whether it is kept. Returns the most that is, to a part in
    2^num_halvings; 0: not even the first."""
    low, high = 0.0, first
    while high < 100 * first and (yield high):
        low, high = high, 2 * high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if (yield middle) else (low, middle)
    return low


def rate_part(player: Player, levels: ServiceLevels, load: Load) -> None:
    """All search side by side, so that each feels the same of what else goes on."""
    ways = (*load.fifo, OURS)
    searches = {way: searched(load.first_rate, load.num_halvings) for way in ways}
    asked, rates = {way: next(search) for way, search in searches.items()}, dict[Way, float]()
    while asked:
        for way, rate in list(asked.items()):
            answered = player.play(way, mixed(rate, load.rate_seconds, load, bursts=True))
            try:
                asked[way] = searches[way].send(is_kept(answered, levels))
            except StopIteration as found:
                rates[way] = found.value
                del asked[way]
    print(f"\nRequests a second with every promise kept at p99 ({player.name}, {load.rate_seconds:.0f} s)")
    for way in ways:
        print(f"  {way!s:28} {rates[way]:6.2f}")
    best = max(rates[way] for way in load.fifo)
    print(f"  {OURS} over the best fifo: " + (f"{rates[OURS] / best:.2f} x" if best else "fifo keeps none at any rate"))


def quiet_ones(answered: Sequence[Answered]) -> list[Answered]:
    """In the order they came in."""
    found = [one for one in answered if one.request.tenant != FLOODER]
    return sorted(found, key=lambda one: one.request.arrival_s)


def changes(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Of p99 TTFT and p99 ITL, what the second side has over the first."""
    (ttft_s, itl_s), (later_ttft_s, later_itl_s) = felt([one for one, _ in pairs]), felt([one for _, one in pairs])
    return later_ttft_s / max(ttft_s, 1e-9) - 1, later_itl_s / max(itl_s, 1e-9) - 1


def bounds(pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    """Between which nine of ten such changes lie, if other requests of the kind had come instead."""
    drawn = random.Random(0)
    again = [changes(drawn.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED)]
    both = [sorted(values) for values in zip(*again, strict=True)]
    return [(values[RESAMPLED // 20], values[-RESAMPLED // 20 - 1]) for values in both]


def flood_part(player: Player, load: Load) -> None:
    ways = (load.fifo[0], OURS)
    pairs: dict[Way, list[Pair]] = {way: [] for way in ways}
    for seed in range(1, load.num_plays + 1):
        quiet = mixed(load.quiet_rate, load.flood_seconds, load, bursts=False, seed=seed)
        drawn, number = random.Random(6 + seed), int(load.flood_rate * load.flood_seconds)
        flood = [request(drawn, place / load.flood_rate, FLOODER, "chat", load) for place in range(number)]
        for way in ways:
            traces = (quiet, sorted([*quiet, *flood], key=lambda one: one.arrival_s))
            sides = [quiet_ones(player.play(way, trace, without=FLOODER)) for trace in traces]
            pairs[way] += zip(*sides, strict=True)
    print(
        f"\nQuiet tenants' p99 without and with a flood of {load.flood_rate:g} requests a second ({player.name}; "
        f"{load.num_plays} x {load.flood_seconds:.0f} s)"
    )
    for way in ways:
        for level in ("chat", "document"):
            own = [pair for pair in pairs[way] if pair[0].request.service_level == level]
            sides = zip(*(felt([pair[side] for pair in own]) for side in (0, 1)), strict=True)
            shown = [
                f"{name} {1e3 * before:7.1f} -> {1e3 * after:7.1f} ms ({change:+.0%}, from {low:+.0%} to {high:+.0%})"
                for name, (before, after), change, (low, high) in zip(
                    ("TTFT", "ITL"), sides, changes(own), bounds(own), strict=True
                )
            ]
            print(f"  {way!s:28} {level:9} {len(own):5}  {'; '.join(shown)}")


def newcomer_part(options: argparse.Namespace) -> None:
    """On the CPU alone. The promise is made of what the same streams do undisturbed."""
    num_tokens, answer = (600, 60) if options.quick else (4000, 400)
    streams = [TraceRequest(0.0, 64, answer, tenant=f"quiet-{number}", service_level="even") for number in range(8)]

    def levels(itl_s: float | None) -> ServiceLevels:
        return ServiceLevels((DERIVED, ServiceLevel("even", itl_s=itl_s)))

    alone = Real(levels(None)).play(Way("fair"), streams)
    usual_s = statistics.median(gap_s for one in alone for gap_s in one.timing.itl_s)
    newcomer = TraceRequest(20 * usual_s, num_tokens, 1, tenant="newcomer", service_level="default")
    print(f"\n8 streams write, {1e3 * usual_s:.1f} ms a token undisturbed; a prompt of {num_tokens} tokens comes")
    ways = {
        "unchunked": (Way("fifo", num_tokens + 8), None),
        **{
            f"fifo, chunks of {size}": (Way("fifo", size), None)
            for size in ((128,) if options.quick else (64, 128, 256, 512))
        },
        "promise of twice the ITL": (OURS, 2 * usual_s),
    }
    first_s: float | None = None
    for name, (way, itl_s) in ways.items():
        answered = Real(levels(itl_s), max_context=num_tokens + 600).play(way, [*streams, newcomer])
        ttft_s = next(one.timing.ttft_s or 0.0 for one in answered if one.request.tenant == "newcomer")
        _, itl_p99_s = felt(of_level(answered, "even"))
        first_s = first_s or ttft_s
        print(
            f"  {name:26} ITL p99 {1e3 * itl_p99_s:7.1f} ms ({itl_p99_s / usual_s:5.2f} x)   "
            f"newcomer's TTFT {ttft_s:6.2f} s ({ttft_s / first_s:.2f} x)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter traces, fewer chunks: to see that it works")
    parser.add_argument("--parts", default="rate,flood,newcomer")
    parser.add_argument("--on", default="h200,cpu")
    options = parser.parse_args()
    parts, on = options.parts.split(","), options.on.split(",")
    sides: list[tuple[Player, ServiceLevels, Load]] = []
    if "h200" in on:
        sides.append((Simulated(ON_H200), ON_H200, H200_LOAD))
    if "cpu" in on:
        sides.append((Real(ON_CPU, max_context=1024), ON_CPU, CPU_LOAD))
    for player, levels, load in sides:
        given = load.quick() if options.quick else load
        if "rate" in parts:
            rate_part(player, levels, given)
        if "flood" in parts:
            flood_part(player, given)
    if "newcomer" in parts and "cpu" in on:
        newcomer_part(options)


if __name__ == "__main__":
    main()
