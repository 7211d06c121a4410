"""What promises are kept at which load: `fifo` with constant chunks beside the default policy, on the same traces.

    python -m bench.promises [--quick] [--parts rate,flood,newcomer] [--on h200,cpu] [--minutes 9.5] [--plays 3]
                             [--long]

rate: a mixed trace (chats, documents, bursts of one tenant that floods) at ever more requests a second: the most at
which p99 TTFT and p99 ITL of every class are as promised. Of `fifo` the best of several constant chunks counts. flood:
one tenant sends far more than its share, beside the same requests of quiet tenants with and without it: what these feel
of it, and between which bounds that lies. newcomer: 8 streams write, and a prompt of 4k comes; a gap may be twice as
long as without it (`bench/promise_newcomer.py`).

On the simulated H200 chats have 100 to 600 tokens, documents 3k to 12k. On the CPU prompts and answers are shorter, so
that a play has more than a handful; `--long` plays the same lengths there, as far as SmolLM2's context goes. What was
played is printed, with the number of requests of each class: of fewer than a hundred the p99 is the worst one. The
sides of a trace are played one after another. `--minutes` ends the CPU's search and flood in time, with what was found
by then."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Generator, Sequence
from math import inf

from bench.promise_loads import (
    CPU_LOAD,
    CPU_LONG_LOAD,
    FLOODER,
    H200_LOAD,
    ON_CPU,
    ON_CPU_LONG,
    ON_H200,
    Load,
    mixed,
    request,
)
from bench.promise_newcomer import newcomer_part
from bench.promise_players import Answered, Real, Simulated, Way
from twostroke.core.service_level import ServiceLevels
from twostroke.planner.report import percentiles

OURS = Way("fair")
RATE_SHARE = 0.65
"""Of the minutes, where the flood is played, too."""
RESAMPLED = 200
Player = Simulated | Real
Pair = tuple[Answered, Answered]
"""One request, without and with the flood."""


class Until:
    """When to begin nothing more that takes as long as the last one did."""

    def __init__(self, seconds: float) -> None:
        self._began_s = self._last_s = time.monotonic()
        self._end_s = self._began_s + seconds

    def is_over(self) -> bool:
        """Asked behind each."""
        now_s = time.monotonic()
        took_s, self._last_s = now_s - self._last_s, now_s
        return now_s + took_s > self._end_s


def felt(answered: Sequence[Answered]) -> tuple[float, float]:
    """p99 TTFT, infinite where nobody was answered, and p99 ITL."""
    ttft_s = percentiles(one.ttft_s for one in answered if one.ttft_s is not None)
    itl_s = percentiles(gap_s for one in answered for gap_s in one.timing.itl_s)
    return ttft_s.get("p99", inf), itl_s.get("p99", 0.0)


def of_level(answered: Sequence[Answered], level: str) -> list[Answered]:
    return [one for one in answered if one.request.service_level == level]


def is_kept(answered: Sequence[Answered], levels: ServiceLevels) -> bool:
    """Every promise; that of a class of which nobody was answered is not."""
    for level in levels.levels:
        if level.ttft_s is None or level.itl_s is None:
            continue
        ttft_s, itl_s = felt(of_level(answered, level.name))
        if ttft_s > level.ttft_s or itl_s > level.itl_s:
            return False
    return True


def searched(first: float, num_halvings: int) -> Generator[float, bool, None]:
    """Rates to be tried, each answered with whether it is kept: to a part in 2^num_halvings."""
    low, high = 0.0, first
    while high < 100 * first and (yield high):
        low, high = high, 2 * high
    for _ in range(num_halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if (yield middle) else (low, middle)


def rate_part(player: Player, levels: ServiceLevels, load: Load, seconds: float = inf) -> None:
    """All search side by side, so that each feels the same of what else goes on."""
    ways, until = (*load.fifo, OURS), Until(seconds)
    searches = {way: searched(load.first_rate, load.num_halvings) for way in ways}
    asked: dict[Way, float | None] = {way: next(search) for way, search in searches.items()}
    kept = {way: (0.0, Counter[str]()) for way in ways}
    broken: dict[Way, float] = dict.fromkeys(ways, inf)
    while any(asked.values()):
        for way, rate in asked.items():
            if rate is None:
                continue
            answered = player.play(way, mixed(rate, load.rate_seconds, load, bursts=True))
            if all_kept := is_kept(answered, levels):
                kept[way] = rate, Counter(one.request.service_level for one in answered)
            else:
                broken[way] = min(rate, broken[way])
            asked[way] = next_of(searches[way], all_kept)
        if until.is_over():
            break
    print(f"\nRequests a second with every promise kept at p99 ({player.name}, {load.rate_seconds:.0f} s)")
    print(f"  {load}")
    for way, (rate, numbers) in kept.items():
        found = ", ".join(f"{number} {level}" for level, number in sorted(numbers.items()))
        print(f"  {way!s:28} {rate:6.2f}, not at {broken[way]:.2f}   {found}")
    print("  of fewer than 100 requests of a class, the p99 is the worst one")
    rates = {way: rate for way, (rate, _) in kept.items()}
    best = max(rates[way] for way in load.fifo)
    print(f"  {OURS} over the best fifo: " + (f"{rates[OURS] / best:.2f} x" if best else "fifo keeps none at any rate"))


def next_of(search: Generator[float, bool, None], answer: bool) -> float | None:
    """None: it is over."""
    try:
        return search.send(answer)
    except StopIteration:
        return None


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


def flood_part(player: Player, load: Load, seconds: float = inf) -> None:
    ways, until = (load.fifo[0], OURS), Until(seconds)
    pairs: dict[Way, list[Pair]] = {way: [] for way in ways}
    seed = 0
    while seed == 0 or (seed < load.num_plays and not until.is_over()):
        seed += 1
        quiet = mixed(load.quiet_rate, load.flood_seconds, load, bursts=False, seed=seed)
        drawn, number = random.Random(6 + seed), int(load.flood_rate * load.flood_seconds)
        flood = [request(drawn, place / load.flood_rate, FLOODER, "chat", load) for place in range(number)]
        for way in ways:
            traces = (quiet, sorted([*quiet, *flood], key=lambda one: one.arrival_s))
            sides = [quiet_ones(player.play(way, trace, without=FLOODER)) for trace in traces]
            pairs[way] += zip(*sides, strict=True)
    print(
        f"\nQuiet tenants' p99 without and with a flood of {load.flood_rate:g} requests a second ({player.name}; "
        f"{seed} x {load.flood_seconds:.0f} s)"
    )
    print(f"  {load}")
    for way in ways:
        for level in ("chat", "document"):
            own = [pair for pair in pairs[way] if pair[0].request.service_level == level]
            if not own:
                print(f"  {way!s:28} {level:9} nobody came")
                continue
            sides = zip(*(felt([pair[side] for pair in own]) for side in (0, 1)), strict=True)
            shown = [
                f"{name} {1e3 * before:7.1f} -> {1e3 * after:7.1f} ms ({change:+.0%}, from {low:+.0%} to {high:+.0%})"
                for name, (before, after), change, (low, high) in zip(
                    ("TTFT", "ITL"), sides, changes(own), bounds(own), strict=True
                )
            ]
            print(f"  {way!s:28} {level:9} {len(own):5}  {'; '.join(shown)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter traces, fewer chunks: to see that it works")
    parser.add_argument("--parts", default="rate,flood,newcomer")
    parser.add_argument("--on", default="h200,cpu")
    parser.add_argument("--minutes", type=float, default=inf, help="for the CPU's rate and flood together")
    parser.add_argument("--plays", type=int, default=3, help="of each way of the newcomer, in turn (default: 3)")
    parser.add_argument("--long", action="store_true", help="on the CPU, prompts as long as SmolLM2's context allows")
    options = parser.parse_args()
    parts, on = options.parts.split(","), options.on.split(",")
    sides: list[tuple[Player, ServiceLevels, Load]] = []
    if "h200" in on:
        sides.append((Simulated(ON_H200), ON_H200, H200_LOAD))
    if "cpu" in on and options.long:
        sides.append((Real(ON_CPU_LONG, max_context=8192), ON_CPU_LONG, CPU_LONG_LOAD))
    elif "cpu" in on:
        sides.append((Real(ON_CPU, max_context=1024), ON_CPU, CPU_LOAD))
    for player, levels, load in sides:
        given = load.quick() if options.quick else load
        seconds = 60.0 * options.minutes if isinstance(player, Real) else inf
        began_s = time.monotonic()
        if "rate" in parts:
            rate_part(player, levels, given, seconds * RATE_SHARE if "flood" in parts else seconds)
        if "flood" in parts:
            flood_part(player, given, seconds - (time.monotonic() - began_s))
    if "newcomer" in parts and "cpu" in on:
        newcomer_part(1 if options.quick else options.plays, quick=options.quick)


if __name__ == "__main__":
    main()
