"""What streams feel of a long prompt on this machine's CPU, for `bench/promises.py`: 8 streams write, and a prompt of
4,000 tokens comes; a gap may be twice as long as without it. Each way is played several times, in turn, and beside them
the same streams undisturbed. The worst steps are shown as predicted and as measured, so that it is seen what broke a
promise: a step that was planned too long, or one that took longer than planned."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.promise_loads import DERIVED
from bench.promise_players import Answered, Real, StepTaken, Way
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.planner.report import percentiles
from twostroke.planner.trace import TraceRequest

NUM_STREAMS, NEWCOMER, EVEN = 8, "newcomer", "even"
PROMISED_TIMES = 2.0
NUM_WORST = 5
PLAYED_TOKENS, QUICK_TOKENS = (4000, 400), (600, 60)
"""Of the newcomer's prompt, and of a stream's answer."""
CHUNKS, QUICK_CHUNKS = (64, 128, 256, 512), (128,)


@dataclass
class Seen:
    """Of one way, a value a play."""

    itl_p99_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)
    steps: list[list[StepTaken]] = field(default_factory=list)

    def take(self, answered: Sequence[Answered], steps: Sequence[StepTaken]) -> None:
        self.itl_p99_s.append(percentiles(gaps_of(answered)).get("p99", 0.0))
        self.ttft_s += [one.ttft_s or 0.0 for one in answered if one.request.tenant == NEWCOMER]
        self.steps.append(list(steps))

    @property
    def mixed(self) -> list[StepTaken]:
        """Steps of all plays that read beside streams."""
        return [step for play in self.steps for step in play if step.num_streams and step.num_read]


def gaps_of(answered: Iterable[Answered]) -> list[float]:
    """The streams'."""
    return [gap_s for one in answered if one.request.tenant != NEWCOMER for gap_s in one.timing.itl_s]


def spread(values: Sequence[float], unit: float, digits: int) -> str:
    """The median, and between which values the plays lie."""
    low, middle, high = min(values) / unit, statistics.median(values) / unit, max(values) / unit
    return f"{middle:.{digits}f} x ({low:.{digits}f} to {high:.{digits}f})"


def newcomer_part(num_plays: int, *, quick: bool = False, model: str = "smollm2") -> None:
    """The promise is made of what the same streams do undisturbed."""
    num_tokens, answer = QUICK_TOKENS if quick else PLAYED_TOKENS
    streams = [
        TraceRequest(0.0, 64, answer, tenant=f"quiet-{number}", service_level=EVEN) for number in range(NUM_STREAMS)
    ]

    def player(itl_s: float | None) -> Real:
        levels = ServiceLevels((DERIVED, ServiceLevel(EVEN, itl_s=itl_s)))
        return Real(levels, max_context=num_tokens + answer + 200, model=model)

    alone = Way("fair")
    usual_s = statistics.median(gaps_of(player(None).play(alone, streams)))
    newcomer = TraceRequest(20 * usual_s, num_tokens, 1, tenant=NEWCOMER, service_level="default")
    print(f"\n8 streams write, {1e3 * usual_s:.1f} ms a token undisturbed; a prompt of {num_tokens} tokens comes")
    print(f"plays of each, in turn: {num_plays}; the median, and between which values all are")
    unchunked, promised = "unchunked", "promise of twice the ITL"
    ways: dict[str, tuple[Way, float | None, list[TraceRequest]]] = {
        "undisturbed": (alone, None, streams),
        unchunked: (Way("fifo", num_tokens + NUM_STREAMS), None, [*streams, newcomer]),
        **{
            f"fifo, chunks of {size}": (Way("fifo", size), None, [*streams, newcomer])
            for size in (QUICK_CHUNKS if quick else CHUNKS)
        },
        promised: (Way("fair"), PROMISED_TIMES * usual_s, [*streams, newcomer]),
    }
    seen = {name: Seen() for name in ways}
    for _ in range(num_plays):
        for name, (way, itl_s, trace) in ways.items():
            played = player(itl_s)
            seen[name].take(played.play(way, trace), played.steps)
    first_s = statistics.median(seen[unchunked].ttft_s)
    for name, found in seen.items():
        first = f"   newcomer's TTFT {statistics.median(found.ttft_s):6.2f} s, " if found.ttft_s else ""
        print(
            f"  {name:26} ITL p99 {1e3 * statistics.median(found.itl_p99_s):7.1f} ms, "
            f"{spread(found.itl_p99_s, usual_s, 2)}{first}{spread(found.ttft_s, first_s, 2) if first else ''}"
        )
    for name in (unchunked, promised):
        show_steps(name, seen[name], usual_s, num_plays)


def show_steps(name: str, found: Seen, usual_s: float, num_plays: int) -> None:
    """Where the time of a newcomer goes, and what its worst steps were planned to take."""
    if not (mixed := found.mixed):
        print(f"  {name}: no step read beside streams")
        return
    number = len(mixed) / num_plays
    print(
        f"  {name}: {number:.0f} steps read beside streams; writing alone would have taken {number * usual_s:.2f} s of "
        f"their {sum(step.measured_s for step in mixed) / num_plays:.2f} s"
    )
    off = percentiles(step.measured_s / step.predicted_s for step in mixed if step.predicted_s)
    print("    measured over predicted: " + ", ".join(f"{key} {value:.2f}" for key, value in off.items()))
    for step in sorted(mixed, key=lambda one: one.measured_s, reverse=True)[:NUM_WORST]:
        predicted, measured = (
            f"{1e3 * seconds:7.1f} ms ({seconds / usual_s:.2f} x)" for seconds in (step.predicted_s, step.measured_s)
        )
        print(f"    {step.num_read:4} tokens beside {step.num_streams}: predicted {predicted}, measured {measured}")
