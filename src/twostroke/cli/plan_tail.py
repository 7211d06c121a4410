"""What a formula cannot tell of the deployments that a search found: percentiles, from random arrivals on one of their
copies, simulated. What a simulation does not confirm gets more copies, or another one is cheaper then."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from twostroke.cli.simulate_device import replica_on
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.cost.classify import RequestLengths
from twostroke.planner.report import Objective
from twostroke.planner.search import MAX_REPLICAS, Found, Load, ServiceLevel, cheapness, with_replicas
from twostroke.planner.simulate import simulate
from twostroke.planner.trace import Lengths, poisson

READ_TOKENS, WRITTEN_TOKENS = 3_000_000, 300_000
"""Of all prompts and all answers, at most: two seconds or so of simulation."""
FEWEST_REQUESTS, MOST_REQUESTS = 20, 2000


@dataclass(frozen=True, slots=True)
class Tail:
    num_requests: int
    requests_per_s: float
    """That arrive at one copy, or at one lane of it."""
    ttft_s: dict[str, float]
    """By percentile: p50, p90, p99."""
    itl_s: dict[str, float]
    met_share: float
    """Of its requests, how many met the service level, each by itself."""


MET_SHARE = 0.9
"""Of simulated requests, how many have to meet the service level, each by itself: a level of means is met by half of
them."""
MOST_TRIES = 10
"""Simulations of a search."""


def confirmed(
    found: Sequence[Found], lengths: RequestLengths, level: ServiceLevel, load: Load, config: EngineConfig
) -> tuple[list[Found], Tail | None, bool]:
    """The cheapest whose simulation meets the level first, and what was simulated of it; whether it meets it. What
    fails gets a quarter more copies, and its turn by its new price. Where too many fail, the best of them."""
    assert load.requests_per_s is not None
    left, failed = list(found), []
    for _ in range(MOST_TRIES):
        one = left.pop(0)
        tail = tail_of(one, lengths, level, load.requests_per_s, config)
        if tail is None or tail.met_share >= MET_SHARE:
            return [one, *left], tail, True
        failed.append((tail.met_share, one, tail))
        more = math.ceil(1.25 * one.deployment.replicas)
        if more <= MAX_REPLICAS:
            insort(left, with_replicas(one, more, lengths, load), key=cheapness)
        if not left:
            break
    _, best, tail = max(failed, key=lambda entry: entry[0])
    return [best], tail, False


def tail_of(
    found: Found, lengths: RequestLengths, level: ServiceLevel, requests_per_s: float, config: EngineConfig
) -> Tail | None:
    """None: requests are too long to simulate enough of them, or longer than what an engine would take there."""
    rate = requests_per_s / found.deployment.replicas / found.deployment.lanes
    num_requests = min(MOST_REQUESTS, READ_TOKENS // lengths.input_tokens, WRITTEN_TOKENS // lengths.output_tokens)
    if num_requests < FEWEST_REQUESTS:
        return None
    prompts, answers = (Lengths(tokens, tokens) for tokens in (lengths.input_tokens, lengths.output_tokens))
    trace = poisson(rate, num_requests, prompts, answers)
    if lengths.cached_tokens:
        trace = [replace(one, prefix="shared", prefix_tokens=lengths.cached_tokens) for one in trace]
    try:
        report = simulate(replica_on(found.deployment, found.efficiency, config), trace)
    except BadRequestError:
        return None
    if not report.served.ttft_s:
        return None
    share, _ = report.goodput(Objective(level.ttft_s, level.tpot_s))
    return Tail(num_requests, rate, report.ttft_s, report.itl_s, share)
