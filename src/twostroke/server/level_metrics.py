"""What is counted by class: what was promised, what was kept, how much room is left. `docs/metrics.md` defines each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.cluster.demand import LevelSignals
from twostroke.core.sequence import FinishReason
from twostroke.core.service_level import DEFAULT_LEVEL
from twostroke.core.timing import SequenceTiming
from twostroke.server.messages import Stats
from twostroke.server.recent import Recent

LEVEL = "service_level"
PREFILL, DECODE = "prefill", "decode"
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


def judged(timing: SequenceTiming, gaps_s: Sequence[float], reason: FinishReason) -> tuple[bool | None, bool | None]:
    """Whether the promise of each phase was kept; None: nothing was promised, or nothing can be said, as of a client
    that left before its time was over."""
    promise = timing.promise
    if promise is None:
        return None, None
    if timing.ttft_s is None and reason in WHOLE and timing.total_s is not None:  # a vector, which comes at once
        return promise.kept_ttft(timing.total_s), None
    kept_ttft = promise.kept_ttft(timing.ttft_s)
    if timing.ttft_s is None:
        if kept_ttft is False and reason is FinishReason.ABORT and timing.total_s is not None:
            kept_ttft = None if promise.kept_ttft(timing.total_s) else False
        return kept_ttft, None
    return kept_ttft, promise.kept_itl(gaps_s)


class LevelMetrics(Collector):
    def __init__(self, registry: CollectorRegistry, engine: Callable[[], Stats | None]) -> None:
        self._engine = engine
        self.recent = Recent()
        self._requests = Counter(
            "twostroke_level_requests", "Samples that ended, by class and reason", (LEVEL, "reason"), registry=registry
        )
        self._promises = Counter(
            "twostroke_promises",
            "Promises of samples that ended, by class, phase and whether they were kept",
            (LEVEL, "phase", "outcome"),
            registry=registry,
        )
        self._good = Counter(
            "twostroke_good_requests", "Samples that ended whole and kept their promise", (LEVEL,), registry=registry
        )
        registry.register(self)

    def finished(self, timing: SequenceTiming, gaps_s: Sequence[float], reason: FinishReason) -> None:
        level = DEFAULT_LEVEL if timing.promise is None else timing.promise.level
        self._requests.labels(level, reason.value).inc()
        outcomes = judged(timing, gaps_s, reason)
        for phase, is_kept in zip((PREFILL, DECODE), outcomes, strict=True):
            if is_kept is not None:
                self._promises.labels(level, phase, "kept" if is_kept else "broken").inc()
        if reason in WHOLE and False not in outcomes:
            self._good.labels(level).inc()
            self.recent.kept(level)

    def collect(self) -> Iterator[Metric]:
        goodput = GaugeMetricFamily(
            "twostroke_goodput", "Samples a second that kept their promise, over the last minute", labels=[LEVEL]
        )
        for level, rate in self.recent.goodput().items():
            goodput.add_metric([level], rate)
        yield goodput
        stats = self._engine()
        if stats is not None and stats.levels:
            yield from _standing(stats.levels)


def _standing(levels: Sequence[LevelSignals]) -> Iterator[Metric]:
    waiting = GaugeMetricFamily("twostroke_level_waiting", "Samples that wait to be admitted, by class", labels=[LEVEL])
    running = GaugeMetricFamily("twostroke_level_running", "Samples that run, by class", labels=[LEVEL])
    backlog = GaugeMetricFamily(
        "twostroke_level_prefill_backlog_seconds", "What reading a class's prompts should take", labels=[LEVEL]
    )
    promised = GaugeMetricFamily(
        "twostroke_promised_seconds", "What a class promises, by phase", labels=[LEVEL, "phase"]
    )
    headroom = GaugeMetricFamily(
        "twostroke_headroom_seconds", "What is left of a class's promise, by phase", labels=[LEVEL, "phase"]
    )
    for level in levels:
        waiting.add_metric([level.name], level.waiting)
        running.add_metric([level.name], level.running)
        if level.prefill_backlog_s is not None:
            backlog.add_metric([level.name], level.prefill_backlog_s)
        for phase, target_s, left_s in (
            (PREFILL, level.ttft_s, level.ttft_headroom_s),
            (DECODE, level.itl_s, level.itl_headroom_s),
        ):
            if target_s is not None:
                promised.add_metric([level.name, phase], target_s)
            if left_s is not None:
                headroom.add_metric([level.name, phase], left_s)
    yield from (waiting, running, backlog, promised, headroom)
