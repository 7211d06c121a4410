"""A pool's size on Ray: the signals of its replicas in, the number that there should be out, by `cluster/autoscale.py`.
Ray brings numbers by name and replica, so signals travel flat. Made for Ray's AutoscalingPolicy, imports none of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from twostroke.cluster.role import Role

WHOLE = ("waiting", "running_prefill", "running_decode", "max_running", "running", "fitting_streams")
"""Counts, which Ray averages."""
LEVELS = "levels/"


def flat(signals: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of `/autoscale`'s signals, by name; of classes `levels/NAME/field`. What is not known is left out."""
    numbers = {name: float(value) for name, value in signals.items() if _is_number(value)}
    for level in signals.get("levels", ()):
        fields = {name: value for name, value in level.items() if _is_number(value)}
        numbers |= {f"{LEVELS}{level['name']}/{name}": float(value) for name, value in fields.items()}
    return numbers


def unflat(numbers: Mapping[str, float]) -> dict[str, Any]:
    """The signals again."""
    signals: dict[str, Any] = {}
    levels: dict[str, dict[str, Any]] = {}
    for name, value in numbers.items():
        if not name.startswith(LEVELS):
            signals[name] = round(value) if name in WHOLE else value
            continue
        level, _, own = name.removeprefix(LEVELS).rpartition("/")
        levels.setdefault(level, {"name": level})[own] = round(value) if own in WHOLE else value
    return signals | {"levels": list(levels.values())}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class PoolPolicy:
    """One for each pool, for the life of Ray's controller: it remembers what it decided before."""

    def __init__(
        self,
        role: str = "both",
        least: int = 1,
        most: int = 1,
        scaling: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from twostroke.cluster.autoscale import Bounds, PoolState, Rules, State

        self._kind: Any = Role(role).value
        self._bounds, self._rules, self._clock = Bounds(least, most), Rules(**dict(scaling or {})), clock
        started: dict[Any, PoolState] = {self._kind: PoolState(worked_s=clock())}
        self._state = State(started)  # its first replicas are given time to start

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray's AutoscalingContext."""
        from twostroke.cluster.autoscale import PoolSignals, scale
        from twostroke.cluster.demand import Signals

        replicas = by_replica(context.aggregated_metrics or {})
        signals = tuple(msgspec.convert(unflat(numbers), Signals, strict=False) for numbers in replicas.values())
        starting = max(0, int(context.current_num_replicas) - len(signals))
        # Nobody calls replicas by way of Ray but whoever holds requests for an empty pool: cluster/door.py. A first
        # replica that is not there yet is waited for, too, however long it takes.
        is_awaited = not signals and int(context.target_num_replicas) > 0
        pool = PoolSignals(signals, starting, held=math.ceil(context.total_queued_requests or 0.0) or int(is_awaited))
        targets, self._state = scale(
            self._clock(), {self._kind: pool}, self._state, {self._kind: self._bounds}, self._rules
        )
        target = targets[self._kind]
        return target.replicas, {"load": target.load, "why": target.why}


def by_replica(metrics: Mapping[str, Mapping[Any, float]]) -> dict[Any, dict[str, float]]:
    """Ray has them by name first."""
    found: dict[Any, dict[str, float]] = {}
    for name, values in metrics.items():
        for replica, value in values.items():
            found.setdefault(replica, {})[name] = value
    return found
