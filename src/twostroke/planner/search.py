"""The cheapest deployment that meets a service level: every device, cut and quantisation that is asked about, each with
as many replicas as the load needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from twostroke.core.errors import BadRequestError
from twostroke.cost.classify import RequestLengths
from twostroke.planner.deployment import DEVICES_A_MACHINE, Deployment
from twostroke.planner.efficiency import Efficiency
from twostroke.planner.estimate import expected_of, phases_of
from twostroke.planner.phases import Loaded


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """Means, not percentiles: what the tail does is the simulator's to tell."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise BadRequestError(f"a service level's {name} must be above 0")

    def is_met(self, loaded: Loaded) -> bool:
        return loaded.ttft_s <= self.ttft_s and loaded.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Load:
    """Requests a second, or users who each ask again when answered: one of the two."""

    requests_per_s: float | None = None
    users: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.requests_per_s, self.users) if value is not None]
        if len(given) != 1 or not 0 < given[0] < 1e9:
            raise BadRequestError("a load is a rate of requests or a number of users, above 0: give one of the two")

    def replicas(self, fullest: Loaded) -> int:
        """As many as are needed where each is as full as this one."""
        if self.users is not None:
            return math.ceil(self.users / fullest.users)
        assert self.requests_per_s is not None
        return math.ceil(self.requests_per_s / fullest.requests_per_s)

    def on_one_of(self, replicas: int, at: Callable[[int], Loaded], most: int) -> Loaded:
        """What one of `replicas` gets of this load; `at` says what a number of users get, which is `most` at most."""
        if self.users is not None:
            return at(min(most, math.ceil(self.users / replicas)))
        assert self.requests_per_s is not None
        rate = self.requests_per_s / replicas
        low, high = 1, most  # the fewest users that ask as often
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if at(middle).requests_per_s >= rate else (middle + 1, high)
        return _slowed(at(low), rate)


def _slowed(loaded: Loaded, requests_per_s: float) -> Loaded:
    """The same users, asking no more often than this: between two numbers of them, or a single one with pauses."""
    if loaded.requests_per_s <= requests_per_s:
        return loaded
    share = requests_per_s / loaded.requests_per_s
    return replace(
        loaded,
        requests_per_s=requests_per_s,
        output_tokens_per_s=share * loaded.output_tokens_per_s,
        total_tokens_per_s=share * loaded.total_tokens_per_s,
    )


@dataclass(frozen=True, slots=True)
class Found:
    deployment: Deployment
    loaded: Loaded
    """Of one replica, with its part of the load that was asked about."""
    usd_per_hour: float | None
    efficiency: Efficiency
    """That its times were expected by."""

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """Of one replica, and so of all."""
        price = self.deployment.device.price_per_hour_usd
        if price is None:
            return None
        return 1e6 * price * self.deployment.devices_per_copy / 3600 / self.loaded.output_tokens_per_s


@dataclass(frozen=True, slots=True)
class Rejected:
    deployment: Deployment
    reason: str
    miss: float
    """How many times what is allowed it takes, of what it has too little of: seconds, memory or copies."""
    fits: bool = True
    """In memory: what is too slow by a little may do after all, what does not fit never runs."""


MAX_REPLICAS = 1024
SIZES = (1, 2, 4, 8)


def candidates_of(bases: Sequence[Deployment]) -> Iterator[Deployment]:
    """Each cut, within one machine, that the model's heads, layers and experts and the device's links allow."""
    for base in bases:
        for tensor, pipeline, expert in product(SIZES, SIZES, SIZES):
            num_devices = tensor * pipeline * expert
            if num_devices > DEVICES_A_MACHINE or (num_devices > 1 and base.device.link_bytes_per_s is None):
                continue
            try:
                yield replace(base, tensor_parallel=tensor, pipeline_parallel=pipeline, expert_parallel=expert)
            except BadRequestError:
                continue  # it has no experts, say, or cannot share its heads so


def search(
    candidates: Iterator[Deployment] | Sequence[Deployment],
    lengths: RequestLengths,
    level: ServiceLevel,
    load: Load,
    efficiency: Callable[[Deployment], Efficiency] | None = None,
) -> tuple[list[Found], list[Rejected]]:
    """Cheapest first, those without a public price behind them by their number of devices; and why the others fail, the
    nearest first."""
    found: list[Found] = []
    rejected: list[Rejected] = []
    for candidate in candidates:
        outcome = _try(candidate, lengths, level, load, (efficiency or expected_of)(candidate))
        if isinstance(outcome, Found):
            found.append(outcome)
        else:
            rejected.append(outcome)
    found.sort(key=cheapness)
    rejected.sort(key=lambda one: (not one.fits, one.miss))
    return found, rejected


def cheapness(one: Found) -> tuple[bool, float, int, float]:
    """What a search sorts by."""
    return one.usd_per_hour is None, one.usd_per_hour or 0.0, one.deployment.num_devices, one.loaded.tpot_s


def with_replicas(one: Found, replicas: int, lengths: RequestLengths, load: Load) -> Found:
    """The same with another number of replicas, each with a smaller or larger part of the load."""
    at, most = _at_users(one.deployment, lengths, one.efficiency)
    deployment = replace(one.deployment, replicas=replicas)
    return replace(
        one,
        deployment=deployment,
        loaded=load.on_one_of(replicas, at, most),
        usd_per_hour=deployment.price_per_hour_usd,
    )


def _at_users(
    candidate: Deployment, lengths: RequestLengths, efficiency: Efficiency
) -> tuple[Callable[[int], Loaded], int]:
    """What a number of users get of one replica, and how many it holds."""
    phases = phases_of(candidate, efficiency)
    most = candidate.max_users(lengths.input_tokens + lengths.output_tokens, lengths.cached_tokens)

    def at(users: int) -> Loaded:
        return phases.loaded(lengths.input_tokens, lengths.output_tokens, lengths.cached_tokens, users)

    return at, most


def _try(
    candidate: Deployment, lengths: RequestLengths, level: ServiceLevel, load: Load, efficiency: Efficiency
) -> Found | Rejected:
    at, most = _at_users(candidate, lengths, efficiency)
    if most == 0:
        tokens = lengths.input_tokens + lengths.output_tokens
        lacking = candidate.kv_bytes_per_user(tokens) - candidate.kv_space_bytes
        return Rejected(candidate, "does not fit", 1 + lacking / candidate.memory_bytes, fits=False)
    if load.users is not None:
        most = min(most, load.users)
    alone = at(1)
    if not level.is_met(alone):
        return Rejected(
            candidate,
            f"too slow for one user: TTFT {alone.ttft_s * 1e3:.0f} ms, TPOT {alone.tpot_s * 1e3:.1f} ms",
            max(alone.ttft_s / level.ttft_s, alone.tpot_s / level.tpot_s),
        )
    low, high = 1, most  # both latencies grow with the users, so what is met is met below it too
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if level.is_met(at(middle)) else (low, middle - 1)
    replicas = load.replicas(at(low))
    if replicas > MAX_REPLICAS:
        return Rejected(candidate, f"would need {replicas:,} replicas", replicas / MAX_REPLICAS)
    chosen = replace(candidate, replicas=replicas)
    return Found(chosen, load.on_one_of(replicas, at, low), chosen.price_per_hour_usd, efficiency)
