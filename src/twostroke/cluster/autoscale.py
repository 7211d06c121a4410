"""How many replicas each pool of a fleet should have, and why: a pure function of the pools' signals and of what was
decided before. Prefill follows the seconds of prompts against the promised first token, decode follows KV and the
promised gaps. Knows no replica, no Ray and no clock: whoever calls it starts and drains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from twostroke.cluster.demand import Signals, Wish, once_read, seconds_text, wanted

Kind = Literal["prefill", "decode", "both"]
"""What the replicas of a pool do."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int = 1
    """0: a pool without work may be empty."""
    most: int = 64

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or not self.most:
            raise ValueError(f"a pool has from {self.least} to {self.most} replicas: that is no range")


@dataclass(frozen=True, slots=True)
class Rules:
    """How fast a pool follows its load."""

    start_s: float = 60.0
    """From the wish for a replica to its first request."""
    settle_s: float = 30.0
    """A load is the mean over so long: one moment says little."""
    hold_s: float = 300.0
    """A pool has what the highest load of so long asked for. More is done at once, less only then."""
    idle_s: float = 600.0
    """A pool that may be empty is, after so long without any work."""
    spare: float = 0.1
    """So large a share more than the load asks for: it may rise until a replica is there."""
    growth: float = 2.0
    """At most this many times the present replicas at once: a backlog is not worth more machines than its load."""


@dataclass(frozen=True, slots=True)
class PoolSignals:
    replicas: tuple[Signals, ...] = ()
    """Of those that take requests."""
    starting: int = 0
    held: int = 0
    """Requests that wait for a replica to be there."""

    @property
    def has_work(self) -> bool:
        return self.held > 0 or any(one.waiting + one.running_prefill + one.running_decode > 0 for one in self.replicas)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a pool was asked for at one moment."""

    moment_s: float
    load: float
    """In replicas."""
    settled: float
    """The mean of the loads of late."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """What a decision has to remember of those before."""

    loads: tuple[Loaded, ...] = ()
    """Of the last `hold_s`, oldest first."""
    worked_s: float | None = None
    """When there was work last; None: there never was."""


@dataclass(frozen=True, slots=True)
class Target:
    replicas: int
    """Those that start among them."""
    drain: tuple[int, ...]
    """Of the replicas that take requests, which should take no more, by their place in the signals. What starts is
    called off first."""
    load: float
    why: str


@dataclass(frozen=True, slots=True)
class State:
    pools: dict[Kind, PoolState] = field(default_factory=dict)


def scale(
    moment_s: float,
    pools: dict[Kind, PoolSignals],
    state: State,
    bounds: dict[Kind, Bounds],
    rules: Rules | None = None,
) -> tuple[dict[Kind, Target], State]:
    """`pools`: prefill and decode, or one that does both. A request needs all of them: work in one wakes the others."""
    rules = rules or Rules()
    has_work = any(pool.has_work for pool in pools.values())
    targets: dict[Kind, Target] = {}
    states: dict[Kind, PoolState] = {}
    for kind, pool in pools.items():
        before = state.pools.get(kind, PoolState())
        wish = load_of(kind, pool.replicas, rules)
        after = _remembered(moment_s, before, wish.load, rules, has_work=has_work)
        targets[kind] = _target(moment_s, kind, pool, after, wish, bounds.get(kind, Bounds()), rules)
        states[kind] = after
    return targets, State(states)


def load_of(kind: Kind, replicas: Sequence[Signals], rules: Rules) -> Wish:
    """Of a pool: the loads of its replicas added up, with the sentence of the one that has the largest."""
    wishes = []
    for signals in replicas:
        asked = wanted(once_read(signals, rules.start_s), rules.start_s)
        wishes.append({"prefill": asked.prefill, "decode": asked.decode, "both": asked.both}[kind])
    load = sum(wish.load for wish in wishes)
    largest = max(wishes, key=lambda wish: wish.load, default=None)
    why = "no replica is there" if largest is None else largest.why
    return Wish(math.ceil(load), load, why)


def _remembered(moment_s: float, before: PoolState, load: float, rules: Rules, *, has_work: bool) -> PoolState:
    recent = [one.load for one in before.loads if one.moment_s > moment_s - rules.settle_s]
    settled = (sum(recent) + load) / (len(recent) + 1)
    kept = tuple(one for one in before.loads if one.moment_s > moment_s - rules.hold_s)
    return PoolState((*kept, Loaded(moment_s, load, settled)), moment_s if has_work else before.worked_s)


def _target(
    moment_s: float, kind: Kind, pool: PoolSignals, state: PoolState, wish: Wish, bounds: Bounds, rules: Rules
) -> Target:
    present = len(pool.replicas) + pool.starting
    highest = max(one.settled for one in state.loads)
    asked = math.ceil((1.0 + rules.spare) * highest - ROUNDING)
    count, why = max(1, asked), _why(kind, wish, highest, rules)
    most = max(2, math.ceil(rules.growth * present))
    if count > most:
        count, why = most, f"{why}; that is more than {rules.growth:g} times the present {present}, which is the most"
    if not present:
        count = 1
        why = f"{pool.held} requests wait, and no replica is there" if pool.held else "another pool has work"
    idle_s = math.inf if state.worked_s is None else moment_s - state.worked_s
    if bounds.least == 0 and idle_s >= (rules.idle_s if present else ROUNDING):
        count, why = 0, "there was no work" + ("" if idle_s == math.inf else f" for {seconds_text(idle_s)}")
    bounded = min(max(count, bounds.least), bounds.most)
    if bounded != count:
        why = f"{why}; the pool has {'at least' if bounded > count else 'at most'} {bounded}"
    return Target(bounded, _drained(pool.replicas, bounded), wish.load, why)


def _why(kind: Kind, wish: Wish, highest: float, rules: Rules) -> str:
    does = {"prefill": "read", "decode": "write", "both": "read and write"}[kind]
    text = f"the replicas that {does} have the load of {wish.load:.2f}: {wish.why}"
    if highest > wish.load + 0.01:
        text += f"; the highest of the last {seconds_text(rules.hold_s)} was {highest:.2f}"
    return text


def _drained(replicas: Sequence[Signals], count: int) -> tuple[int, ...]:
    """Those with the least to do, which are free of it first."""

    def work(place: int) -> tuple[int, float]:
        signals = replicas[place]
        return signals.waiting + signals.running_prefill + signals.running_decode, signals.kv_occupancy

    ordered = sorted(range(len(replicas)), key=work)
    return tuple(sorted(ordered[: max(0, len(replicas) - count)]))
