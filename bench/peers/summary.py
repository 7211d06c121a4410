"""From samples to what is claimed: medians with their spread, the best peer of a column, and our lead over it."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bench.peers.guard import Disturbance
from bench.peers.metrics import METRICS, Metric


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one engine: all metrics of a workload, and how quiet the machine was."""

    engine: str
    workload: str
    repetition: int
    attempt: int
    values: Mapping[str, float]
    disturbance: Disturbance

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "noisy": self.disturbance.is_noisy}


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    minimum: float
    maximum: float
    count: int
    noisy: bool
    """No clean sample: the figures are those of noisy ones."""


@dataclass(frozen=True, slots=True)
class Lead:
    peer: str
    peer_median: float
    times: float
    """How many times better ours is."""
    noisy: bool
    """One of the two has no clean sample."""


Spreads = Mapping[str, Mapping[str, Spread]]
"""By metric key, then engine."""


def spread_of(samples: Iterable[Sample], metric: Metric) -> Spread | None:
    """Over the clean samples; over all, and marked, where there is no clean one."""
    found = [sample for sample in samples if sample.workload == metric.workload and metric.name in sample.values]
    if not found:
        return None
    clean = [sample for sample in found if not sample.disturbance.is_noisy]
    values = [sample.values[metric.name] for sample in clean or found]
    return Spread(statistics.median(values), min(values), max(values), len(values), noisy=not clean)


def summarise(samples: Iterable[Sample], metrics: Iterable[Metric] = METRICS) -> dict[str, dict[str, Spread]]:
    by_engine: dict[str, list[Sample]] = {}
    for sample in samples:
        by_engine.setdefault(sample.engine, []).append(sample)
    summary: dict[str, dict[str, Spread]] = {}
    for metric in metrics:
        spreads = {engine: spread_of(found, metric) for engine, found in by_engine.items()}
        present = {engine: spread for engine, spread in spreads.items() if spread is not None}
        if present:
            summary[metric.key] = present
    return summary


def lead_over(
    metric: Metric, spreads: Mapping[str, Spread], ours: str, peers: Collection[str] | None = None
) -> Lead | None:
    """Our lead over the best of these peers (None: of all) by the ratio of medians."""
    rivals = {name: s for name, s in spreads.items() if name != ours and (peers is None or name in peers)}
    if ours not in spreads or not rivals:
        return None
    pick = max if metric.higher_is_better else min
    best = pick(rivals, key=lambda name: rivals[name].median)
    us, them = spreads[ours], rivals[best]
    return Lead(best, them.median, metric.lead(us.median, them.median), us.noisy or them.noisy)
