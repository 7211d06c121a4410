"""What promises are kept at which load: `fifo` with constant chunks beside the default policy, on the same traces.

    python bench/promises.py [--quick] [--parts rate,flood,newcomer] [--on h200,cpu]

rate: a mixed trace (chats of 100 to 600 tokens, documents of 3k to 12k, bursts of one tenant that floods) at ever more
requests a second: the most at which p99 TTFT and p99 ITL of every class are as promised. Of `fifo` the best of several
constant chunks counts. flood: one tenant sends far more than its share, beside the same requests of quiet tenants with
and without it: what these feel of it. newcomer: 8 streams write, and a prompt of 4k comes; a gap may be twice as long
as without it. On the CPU documents are a quarter as long, and rates are what it can do."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence

from bench.promise_players import Answered, Real, Simulated, Way
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.planner.report import percentiles
from twostroke.planner.trace import TraceRequest

DERIVED = ServiceLevel("default", is_derived=True)
ON_H200 = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 0.5, 0.03), ServiceLevel("document", 3.0, 0.03), ServiceLevel("bulk", 20.0, 0.06))
)
ON_CPU = ServiceLevels(
    (DERIVED, ServiceLevel("chat", 3.0, 0.25), ServiceLevel("document", 15.0, 0.25), ServiceLevel("bulk", 120.0, 0.5))
)
FIFO = (Way("fifo", 256), Way("fifo", 512), Way("fifo", 1024), Way("fifo", 2048))
OURS = Way("fair")
FLOODER, QUIET_TENANTS, BURST_EVERY_S = "flood", 8, 10.0


def request(drawn: random.Random, at_s: float, tenant: str, level: str, scale: float, answers: int) -> TraceRequest:
    lengths = (3000, 12_000) if level == "document" else (100, 600)
    if level == "bulk":
        lengths = drawn.choice([(100, 600), (3000, 12_000)])
    shrink = scale if lengths[0] == 3000 else 1.0
    num_tokens = int(drawn.randint(*lengths) * shrink)
    return TraceRequest(at_s, num_tokens, drawn.randint(answers // 4, answers), tenant=tenant, service_level=level)


def mixed(
    rate: float, seconds: float, scale: float, answers: int, *, bursts: bool, seed: int = 1
) -> list[TraceRequest]:
    """Seven of ten are chats, one a document, and two come in bursts of the flooding tenant, where there are any."""
    drawn, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + drawn.expovariate(0.8 * rate)) < seconds:
        level = "document" if drawn.random() < 1 / 8 else "chat"
        found.append(request(drawn, at_s, f"quiet-{drawn.randrange(QUIET_TENANTS)}", level, scale, answers))
    for burst in range(int(seconds / BURST_EVERY_S) if bursts else 0):
        at_s = (burst + 0.5) * BURST_EVERY_S
        number = max(1, round(0.2 * rate * BURST_EVERY_S))
        found += [request(drawn, at_s, FLOODER, "bulk", scale, answers) for _ in range(number)]
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


def best_rate(kept_at: Callable[[float], bool], first: float, num_halvings: int) -> float:
    """The most requests a second that are kept, to a part in 2^num_halvings; 0: not even the first."""
    low, high = 0.0, first
    while kept_at(high) and high < 100 * first:
        low, high = high, 2 * high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if kept_at(middle) else (low, middle)
    return low


def rate_part(player: Simulated | Real, levels: ServiceLevels, options: argparse.Namespace) -> None:
    is_real = isinstance(player, Real)
    scale, answers, seconds, first = (0.25, 60, 60.0, 0.25) if is_real else (1.0, 200, 120.0, 2.0)
    seconds = seconds / 3 if options.quick else seconds
    ways = FIFO[1:3] if options.quick else FIFO
    ways = ways[:2] if is_real else ways

    def kept_rate(way: Way) -> float:
        def kept_at(rate: float) -> bool:
            return is_kept(player.play(way, mixed(rate, seconds, scale, answers, bursts=True)), levels)

        return best_rate(kept_at, first, 3 if options.quick or is_real else 5)

    rates = {way: kept_rate(way) for way in (*ways, OURS)}
    print(f"\nRequests a second with every promise kept at p99 ({player.name}, {seconds:.0f} s)")
    for way, rate in rates.items():
        print(f"  {way!s:28} {rate:6.2f}")
    best = max(rates[way] for way in ways)
    print(f"  {OURS} over the best fifo: " + (f"{rates[OURS] / best:.2f} x" if best else "fifo keeps none at any rate"))


def flood_part(player: Simulated | Real, options: argparse.Namespace) -> None:
    is_real = isinstance(player, Real)
    scale, answers, seconds, rate, flood_rate = (0.25, 60, 60.0, 0.5, 2.0) if is_real else (1.0, 200, 400.0, 10.0, 50.0)
    seconds = seconds / 4 if options.quick else seconds
    quiet = mixed(rate, seconds, scale, answers, bursts=False)
    drawn, number = random.Random(7), int(flood_rate * seconds)
    flood = [request(drawn, place / flood_rate, FLOODER, "chat", scale, answers) for place in range(number)]
    print(f"\nQuiet tenants' p99 without and with a flood of {flood_rate:g} requests a second ({player.name})")
    for way in (FIFO[1], OURS):
        traces = (quiet, sorted([*quiet, *flood], key=lambda one: one.arrival_s))
        played = [player.play(way, trace) for trace in traces]
        for level in ("chat", "document"):
            sides = [felt([one for one in of_level(one_s, level) if one.request.tenant != FLOODER]) for one_s in played]
            shown = [
                f"{name} {1e3 * before:7.1f} -> {1e3 * after:7.1f} ms ({after / max(before, 1e-9) - 1:+.0%})"
                for name, before, after in zip(("TTFT", "ITL"), *sides, strict=True)
            ]
            print(f"  {way!s:28} {level:9} {'; '.join(shown)}")


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
    players = [(Simulated(ON_H200), ON_H200)] if "h200" in on else []
    sides: list[tuple[Simulated | Real, ServiceLevels]] = [*players, *([(Real(ON_CPU), ON_CPU)] if "cpu" in on else [])]
    for player, levels in sides:
        if "rate" in parts:
            rate_part(player, levels, options)
        if "flood" in parts:
            flood_part(player, options)
    if "newcomer" in parts and "cpu" in on:
        newcomer_part(options)


if __name__ == "__main__":
    main()
