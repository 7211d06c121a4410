"""One pool against two on the same devices: each split played on the same arrivals, which of them serves most requests
as well as asked, and from which prompt length, load and link on two pools are better. All of it is simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from twostroke.core.errors import BadRequestError
from twostroke.cost.classify import RequestLengths
from twostroke.planner.fleet.fleet import simulate_fleet
from twostroke.planner.fleet.link import GIGA, Link
from twostroke.planner.fleet.report import FleetReport
from twostroke.planner.fleet.spec import FleetSpec
from twostroke.planner.phases import Phases
from twostroke.planner.report import Objective
from twostroke.planner.simulate import ReplicaSpec
from twostroke.planner.trace import Lengths, TraceRequest, poisson

READ_TOKENS, WRITTEN_TOKENS = 1_200_000, 60_000
"""Of all prompts and all answers of one simulation, at most: a second or so."""
FEWEST_REQUESTS, MOST_REQUESTS, REQUESTS_A_COPY = 60, 400, 40
MOST_SPLITS = 7
ALONE_TTFT, ALONE_TPOT = 4.0, 2.0
"""Where nobody says what is asked for: this many times what one user has on an idle replica."""
BETTER_SHARE = 0.01
"""Of all requests, how many more two pools have to serve as asked before they are called better: chance is less."""
SPREAD = 0.3
"""Lengths are drawn from so much below the mean to so much above it."""
LENGTH_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
LOAD_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
LINKS_GB = (0.5, 1.0, 3.0, 10.0, 25.0, 50.0, 100.0, 400.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """The load that pools are compared under."""

    lengths: RequestLengths
    requests_per_s: float
    """Over all copies."""
    objective: Objective


@dataclass(frozen=True, slots=True)
class Split:
    prefill: int
    """0: one pool that does both."""
    decode: int
    report: FleetReport
    met_share: float
    """Of all requests, those that met the objective."""
    good_per_s: float

    @property
    def order(self) -> tuple[float, float]:
        """Better ones are larger: more that met it, then the shorter gaps at worst."""
        return round(self.met_share, 3), -self.report.simulation.itl_s.get("p99", 0.0)

    def pays_against(self, other: Split) -> bool:
        return self.met_share > other.met_share + BETTER_SHARE


@dataclass(frozen=True, slots=True)
class Tried:
    """A value of what was varied, and how many met the objective in one pool and in the best two."""

    value: float
    one_share: float
    two_share: float
    prefill: int
    decode: int

    @property
    def pays(self) -> bool:
        return self.two_share > self.one_share + BETTER_SHARE


@dataclass(frozen=True, slots=True)
class Comparison:
    asked: Asked
    link: Link
    num_requests: int
    one: Split
    splits: tuple[Split, ...]
    best: Split
    by_length: tuple[Tried, ...] = ()
    """In tokens of a prompt, at a rate that takes as much of the machines' time."""
    by_load: tuple[Tried, ...] = ()
    """In requests a second."""
    by_link: tuple[Tried, ...] = ()
    """In GB a second, the best split as it is."""

    @property
    def pays(self) -> bool:
        return self.best.pays_against(self.one)


class Comparer:
    """`phases`: of one copy; `spec`: the same as a replica. `objective`: as it was asked for; what is left open follows
    from one user on an idle replica, for every prompt length by itself."""

    def __init__(
        self, spec: ReplicaSpec, phases: Phases, copies: int, link: Link, objective: Objective, seed: int = 0
    ) -> None:
        if copies < 2:
            raise BadRequestError("two pools need two copies of the model at least: give more devices (--count)")
        self._spec, self._phases, self._copies, self._link = spec, phases, copies, link
        self._objective, self._seed = objective, seed

    def compare(self, lengths: RequestLengths, requests_per_s: float, *, sweep: bool = True) -> Comparison:
        asked = self._asked(lengths, requests_per_s)
        trace = self._trace(asked)
        one = self._play(asked, trace, 0, self._link)
        splits = tuple(self._play(asked, trace, number, self._link) for number in self._numbers())
        best = max(splits, key=lambda split: split.order)
        found = Comparison(asked, self._link, len(trace), one, splits, best)
        if not sweep:
            return found
        by_link = tuple(self._over(asked, trace, one, best.prefill, rate) for rate in LINKS_GB)
        return replace(found, by_length=self._by_length(asked), by_load=self._by_load(asked), by_link=by_link)

    def _asked(self, lengths: RequestLengths, requests_per_s: float) -> Asked:
        phases, given = self._phases, self._objective
        ttft_s, tpot_s = given.ttft_s, given.tpot_s
        if ttft_s is None:
            read = lengths.input_tokens - lengths.cached_tokens
            ttft_s = ALONE_TTFT * phases.ttft_alone_s(lengths.cached_tokens, read)
        if tpot_s is None:
            tpot_s = ALONE_TPOT * phases.tpot_s(lengths.input_tokens, lengths.output_tokens, 1)
        return Asked(lengths, requests_per_s, Objective(ttft_s, tpot_s))

    def _numbers(self, around: int | None = None) -> list[int]:
        """How many of the copies read: all numbers that there are, or some of them where they are many; `around` one,
        it and its neighbours."""
        most = self._copies - 1
        if around is not None:
            return sorted({min(most, max(1, around + more)) for more in (-1, 0, 1)})
        count = min(most, MOST_SPLITS)
        return sorted({1 + round(index * (most - 1) / max(1, count - 1)) for index in range(count)})

    def _trace(self, asked: Asked) -> list[TraceRequest]:
        lengths = asked.lengths
        number = self._num_requests(lengths)
        if number < FEWEST_REQUESTS // 3:
            raise BadRequestError(
                f"requests of {lengths.input_tokens:,} tokens in and {lengths.output_tokens:,} out are too long to "
                "simulate enough of them"
            )
        prompts = _around(lengths.input_tokens, lengths.cached_tokens + 1)
        trace = poisson(asked.requests_per_s, number, prompts, _around(lengths.output_tokens, 1), self._seed)
        if lengths.cached_tokens:
            trace = [replace(one, prefix="shared", prefix_tokens=lengths.cached_tokens) for one in trace]
        return trace

    def _num_requests(self, lengths: RequestLengths) -> int:
        """Of one simulation."""
        wanted = max(FEWEST_REQUESTS, min(MOST_REQUESTS, REQUESTS_A_COPY * self._copies))
        return min(wanted, READ_TOKENS // lengths.input_tokens, WRITTEN_TOKENS // lengths.output_tokens)

    def _play(self, asked: Asked, trace: Sequence[TraceRequest], prefill: int, link: Link) -> Split:
        router = "least-loaded" if not prefill else "prefix" if asked.lengths.cached_tokens else "least-backlog"
        spec = FleetSpec(self._spec, self._copies - prefill, prefill, link if prefill else None, router)
        report = simulate_fleet(spec, trace)
        share, per_s = report.simulation.goodput(asked.objective)
        return Split(prefill, self._copies - prefill, report, share, per_s)

    def _tried(self, value: float, asked: Asked) -> Tried:
        """One pool, and two as their work is divided."""
        trace = self._trace(asked)
        one = self._play(asked, trace, 0, self._link)
        around = round(self._copies * self._prefill_share(asked.lengths))
        two = max((self._play(asked, trace, number, self._link) for number in self._numbers(around)), key=_order)
        return Tried(value, one.met_share, two.met_share, two.prefill, two.decode)

    def _prefill_share(self, lengths: RequestLengths) -> float:
        return self._phases.loaded(lengths.input_tokens, lengths.output_tokens, lengths.cached_tokens, 8).prefill_share

    def _by_length(self, asked: Asked) -> tuple[Tried, ...]:
        """Prompts of other lengths, at a rate that takes as much of the machines' time."""
        found = []
        for factor in LENGTH_FACTORS:
            tokens = max(asked.lengths.cached_tokens + 16, round(factor * asked.lengths.input_tokens))
            lengths = replace(asked.lengths, input_tokens=tokens)
            if tokens * (1.0 + SPREAD) + (1.0 + SPREAD) * lengths.output_tokens >= self._spec.scheduler.max_context:
                continue
            rate = asked.requests_per_s * self._rate(lengths) / self._rate(asked.lengths)
            if self._num_requests(lengths) >= FEWEST_REQUESTS // 3:
                found.append(self._tried(tokens, self._asked(lengths, rate)))
        return tuple(found)

    def _rate(self, lengths: RequestLengths) -> float:
        """That one copy serves, with some users at once."""
        loaded = self._phases.loaded(lengths.input_tokens, lengths.output_tokens, lengths.cached_tokens, 8)
        return loaded.requests_per_s

    def _by_load(self, asked: Asked) -> tuple[Tried, ...]:
        rates = [factor * asked.requests_per_s for factor in LOAD_FACTORS]
        return tuple(self._tried(rate, replace(asked, requests_per_s=rate)) for rate in rates)

    def _over(self, asked: Asked, trace: Sequence[TraceRequest], one: Split, prefill: int, rate: float) -> Tried:
        """Another link."""
        two = self._play(asked, trace, prefill, replace(self._link, bytes_per_s=rate * GIGA, name=f"{rate:g} GB/s"))
        return Tried(rate, one.met_share, two.met_share, two.prefill, two.decode)


def _order(split: Split) -> tuple[float, float]:
    return split.order


def _around(tokens: int, least: int) -> Lengths:
    return Lengths(max(least, round((1.0 - SPREAD) * tokens)), max(least, round((1.0 + SPREAD) * tokens)))


def where(tried: Sequence[Tried], unit: Callable[[float], str]) -> str:
    """In which of the tried cases two pools are better, in words."""
    if not tried:
        return "nothing could be tried"
    first, last = unit(tried[0].value), unit(tried[-1].value)
    pays = [one.pays for one in tried]
    if not any(pays):
        return f"nowhere from {first} to {last}"
    if all(pays):
        return f"everywhere from {first} to {last}"
    begins = pays.index(True)
    if all(pays[begins:]):
        return f"from {unit(tried[begins].value)} on; tried from {first} to {last}"
    ends = len(pays) - 1 - pays[::-1].index(True)
    if not begins and all(pays[: ends + 1]):
        return f"up to {unit(tried[ends].value)}; tried from {first} to {last}"
    named = " and ".join(unit(one.value) for one in tried if one.pays)
    return f"at {named} alone; tried from {first} to {last}"
