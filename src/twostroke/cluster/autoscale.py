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
CHANCE = 2.0
"""Standard deviations of what arrives by chance: a rise that is no larger is none."""
PATIENCE = 2.0
"""Times the promised first token: a peak of prompts that is no longer is no reason for another replica."""


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
    """A load is the mean over so long: one moment says little. Those that read take longer, where peaks can wait."""
    hold_s: float = 300.0
    """A pool has the most that was asked for within so long. More is done at once, less only then."""
    idle_s: float = 600.0
    """A pool that may be empty is, after so long without any work."""
    spare: float = 0.25
    """Times the square root of the load, beside the load: it may rise until a replica is there, and chance makes more
    of a difference to a few replicas than to many. Less for prompts that may wait so long."""
    growth: float = 2.0
    """At most this many times the replicas that serve: what else there is to do shows when those that start serve."""


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
    asked: int
    """Replicas, by the mean of the loads of late and as far as a pool grows at once. Not those that it held on to."""
    backlog_s: float = 0.0
    """What reading all known prompts should take one replica."""


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
        asked, why = _asked(moment_s, kind, pool, before, wish, rules)
        kept = tuple(one for one in before.loads if one.moment_s > moment_s - rules.hold_s)
        now = Loaded(moment_s, wish.load, asked, _backlog_s(pool))
        after = PoolState((*kept, now), moment_s if has_work else before.worked_s)
        targets[kind] = _target(moment_s, pool, after, why, bounds.get(kind, Bounds()), rules)
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


def _asked(
    moment_s: float, kind: Kind, pool: PoolSignals, before: PoolState, wish: Wish, rules: Rules
) -> tuple[int, str]:
    """How many replicas this moment asks for, and why."""
    settle_s = _settle_s(kind, pool, rules)
    loads = [one.load for one in before.loads if one.moment_s > moment_s - settle_s] + [wish.load]
    settled = min(wish.load, sum(loads) / len(loads))  # a peak that is over asks for nobody
    asked = max(1, math.ceil(settled + _spare(kind, pool, rules) * math.sqrt(settled) - ROUNDING))
    does = {"prefill": "read", "decode": "write", "both": "read and write"}[kind]
    why = f"the replicas that {does} have the load of {wish.load:.2f}: {wish.why}"
    rising = None if kind == "decode" else _by_rise(moment_s, pool, before, rules)
    if rising is not None and rising.replicas > asked:
        asked, why = rising.replicas, rising.why
    serving = len(pool.replicas)
    most = max(2, math.ceil(rules.growth * serving))
    if asked > most:
        return most, f"{why}; that is more than {rules.growth:g} times the present {serving}, which is the most"
    if not before.loads and serving > asked:
        return serving, f"{why}; what the {serving} there were asked for is not known"
    return asked, why


def _by_rise(moment_s: float, pool: PoolSignals, before: PoolState, rules: Rules) -> Wish | None:
    """Prompts come faster than they are read, and when a replica could be there those that wait will be late: how busy
    replicas were in the last minute tells that too late. As many more are asked for as it takes to read what comes, and
    within as long again what waits too long. None: it is not so, or may be chance."""
    since = next((one for one in before.loads if one.moment_s > moment_s - rules.settle_s), None)
    promised_s = _promised_s(pool)
    if since is None or promised_s is None:
        return None
    backlog_s, num_prompts = _backlog_s(pool), sum(one.num_prompts for one in pool.replicas)
    risen_s = backlog_s - since.backlog_s
    risen_s -= CHANCE * math.sqrt(max(0.0, risen_s) * backlog_s / max(1, num_prompts))
    rise = risen_s / max(moment_s - since.moment_s, ROUNDING)
    serving = len(pool.replicas)
    late_s = backlog_s + rise * rules.start_s - promised_s * (serving + pool.starting)
    if rise <= 0.0 or late_s <= 0.0:
        return None
    load = serving + rise + late_s / rules.start_s
    text = f"what waits to be read grew by {seconds_text(risen_s)} within {seconds_text(moment_s - since.moment_s)}"
    return Wish(math.ceil(load), load, f"{text}, and a first token is promised in {seconds_text(promised_s)}")


def _backlog_s(pool: PoolSignals) -> float:
    return sum(one.prefill_backlog_s or 0.0 for one in pool.replicas)


def _promised_s(pool: PoolSignals) -> float | None:
    """The earliest first token that is promised."""
    promised = [level.ttft_s for one in pool.replicas for level in one.levels if level.ttft_s is not None]
    return min(promised, default=None)


def _settle_s(kind: Kind, pool: PoolSignals, rules: Rules) -> float:
    """Where a first token is promised late, a peak of prompts waits, and is read in time all the same."""
    promised_s = _promised_s(pool)
    if kind != "prefill" or promised_s is None:
        return rules.settle_s
    return max(rules.settle_s, min(PATIENCE * promised_s, rules.hold_s))


def _spare(kind: Kind, pool: PoolSignals, rules: Rules) -> float:
    """What comes by chance is answered when it has settled and a replica has started. Of that time a prompt may wait as
    long as its first token is promised, and nothing need be spare for it."""
    promised_s = _promised_s(pool)
    if kind != "prefill" or promised_s is None:
        return rules.spare
    answered_s = max(_settle_s(kind, pool, rules) + rules.start_s, ROUNDING)
    return rules.spare * max(0.0, 1.0 - promised_s / answered_s)


def _target(moment_s: float, pool: PoolSignals, state: PoolState, why: str, bounds: Bounds, rules: Rules) -> Target:
    """What this moment asks for, or one of those before it that a pool still holds on to."""
    present, now = len(pool.replicas) + pool.starting, state.loads[-1]
    count = max(one.asked for one in state.loads)
    if count > now.asked:
        why += f"; but {count} were asked for within the last {seconds_text(rules.hold_s)}"
    if not present:
        count = 1
        why = f"{pool.held} requests wait, and no replica is there" if pool.held else "another pool has work"
    idle_s = math.inf if state.worked_s is None else moment_s - state.worked_s
    if bounds.least == 0 and idle_s >= (rules.idle_s if present else ROUNDING):
        count, why = 0, "there was no work" + ("" if idle_s == math.inf else f" for {seconds_text(idle_s)}")
    bounded = min(max(count, bounds.least), bounds.most)
    if bounded != count:
        why = f"{why}; the pool has {'at least' if bounded > count else 'at most'} {bounded}"
    return Target(bounded, _drained(pool.replicas, bounded), now.load, why)


def _drained(replicas: Sequence[Signals], count: int) -> tuple[int, ...]:
    """Those with the least to do, which are free of it first."""

    def work(place: int) -> tuple[int, float]:
        signals = replicas[place]
        return signals.waiting + signals.running_prefill + signals.running_decode, signals.kv_occupancy

    ordered = sorted(range(len(replicas)), key=work)
    return tuple(sorted(ordered[: max(0, len(replicas) - count)]))
