"""What the server knows of its load at this moment, put together for whoever scales; and the loads that follow from it,
for Prometheus, so that those of several replicas can be added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.cluster.demand import Signals, fitting_streams, wanted
from twostroke.cost.floor import StepWork
from twostroke.cost.step_cost import StepCost
from twostroke.server.messages import Ready, Stats
from twostroke.server.metrics import Metrics, kv_occupancy


def signals_of(metrics: Metrics, stats: Stats) -> Signals:
    facts, recent = metrics.facts, metrics.levels.recent
    step_s = fitting = None
    if facts is not None and (step_s := _step_of_streams(facts, stats, recent.mean_context())) is not None:
        fitting = fitting_streams(stats.levels, facts.engine.max_running, step_s)
    return Signals(
        waiting=stats.waiting,
        running_prefill=stats.running_prefill,
        running_decode=stats.running_decode,
        max_running=None if facts is None else facts.engine.max_running,
        prefill_backlog_s=stats.prefill_backlog_s,
        prefill_busy=recent.prefill_share(),
        kv_occupancy=kv_occupancy(stats),
        kv_full_s=stats.kv_full_s,
        stream_step_s=recent.stream_step_s(),
        alone_step_s=None if step_s is None else step_s(1),
        fitting_streams=fitting,
        levels=stats.levels,
        goodput=recent.goodput(),
        doubt=stats.step_cost_doubt,
    )


def _step_of_streams(facts: Ready, stats: Stats, context: float | None) -> Callable[[int], float] | None:
    """What a step of this many streams like these should take, by the engine's own costs; None: those are not good
    enough yet, or there was no stream."""
    if stats.step_cost is None or context is None:
        return None
    cost, length = StepCost(facts.engine.shape, *stats.step_cost), max(1, round(context))
    return lambda number: cost.seconds(StepWork(contexts=[length] * number))


class LoadCollector(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("twostroke_load", "Replicas like this one that its load asks for", labels=["phase"])
        if (stats := self._metrics.engine) is not None:
            wishes = wanted(signals_of(self._metrics, stats))
            family.add_metric(["prefill"], wishes.prefill.load)
            family.add_metric(["decode"], wishes.decode.load)
        yield family
