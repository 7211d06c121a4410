"""The server's numbers as Prometheus reads them; `docs/metrics.md` defines each. What requests felt is counted here as
they finish; where the engine stands comes from its last Stats."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.core.tier_report import TierReport
from twostroke.server.handoff_metrics import handoff_metrics
from twostroke.server.level_metrics import LevelMetrics
from twostroke.server.messages import DRAFT_POSITIONS, STEP_BUCKETS_S, Ready, Stats, StepHistogram
from twostroke.server.restarts import Restarts

BUCKETS_S = (*(digit * 10.0**power for power in range(-3, 2) for digit in (1, 2, 5)), 100.0)
"""1 ms to 100 s."""
TOKEN_BUCKETS = tuple(2.0**power for power in range(18))
"""1 to 131,072 tokens."""
LAG_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every counter, which nobody reads

TIMES = {
    "ttft": "Arrival at the engine to the first token",
    "queue": "Arrival at the engine to the first prefill chunk",
    "prefill": "First prefill chunk to the first token",
    "decode": "First token to the last",
    "tpot": "Mean time per output token after the first",
    "request": "Arrival at the engine to the end",
}
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry an app, so that two may live in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.engine: Stats | None = None
        """The last that the engine sent; None while there is none."""
        self.facts: Ready | None = None
        """Of the engine that was last ready."""
        self.engine_up = 0
        self.restarts = Restarts()
        self.http_in_flight = 0
        self.viewers = 0
        """Of those, streams of steps that pages watch."""
        self.mean_sample_s = 1.0
        """From its first chunk to its end, of late: what a client that is turned away is told to wait follows."""
        self.requests = self._counter("requests", "Samples that ended, by reason", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of samples that ended")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Of those, found in the prefix cache")
        self.output_tokens = self._counter("output_tokens", "Tokens written")
        self.http_responses = self._counter("http_responses", "Responses, by route and status", "route", "status")
        self.disconnects = self._counter("client_disconnects", "Clients that went away before their answer was whole")
        self.rejected = self._counter("rejected", "Requests turned away, by reason", "reason")
        self.times = {name: self._histogram(f"{name}_seconds", text) for name, text in TIMES.items()}
        """What samples felt, by name."""
        self.prompt_lengths = self._histogram("request_prompt_tokens", "Prompt tokens of a sample", TOKEN_BUCKETS)
        self.output_lengths = self._histogram("request_output_tokens", "Tokens written to a sample", TOKEN_BUCKETS)
        self.itl = StepHistogram([0] * (len(BUCKETS_S) + 1))
        """Counted here rather than by the library: these are as many as there are tokens."""
        self.gained_s = 0.0
        """By drafts, of samples that ended."""
        self.loop_lag = self._histogram(
            "loop_lag_seconds", "How late the API process's event loop came round", LAG_BUCKETS_S
        )
        self.loop_work = self._histogram(
            "loop_work_seconds", "Of that, what its own thread worked in one go", LAG_BUCKETS_S
        )
        self.levels = LevelMetrics(self.registry, lambda: self.engine)
        self.registry.register(_EngineCollector(self))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"twostroke_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = BUCKETS_S) -> Histogram:
        return Histogram(f"twostroke_{name}", text, buckets=buckets, registry=self.registry)

    def heard(self, stats: Stats) -> None:
        """What the engine says of itself."""
        self.engine = stats
        self.levels.recent.stood(stats.totals)

    def finished(self, output: TokenEvent) -> None:
        """A sample ended, its client still there or not. One that was left to another engine is that one's to count."""
        assert output.finish_reason is not None
        timing = output.timing
        if timing is not None and timing.is_left:
            return
        self.requests.labels(output.finish_reason.value).inc()
        if timing is None:
            return
        gaps_s = timing.itl_s
        self.levels.finished(timing, gaps_s, output.finish_reason)
        if output.sample_index == 0:
            self.prompt_tokens.inc(timing.prompt_tokens)
            self.cached_tokens.inc(timing.cached_tokens)
        self.output_tokens.inc(len(timing.token_times_s))
        self.gained_s += timing.speculation_gain_s
        if timing.finished_s is not None and timing.scheduled_s is not None:
            self.mean_sample_s += 0.05 * (timing.finished_s - timing.scheduled_s - self.mean_sample_s)
        self.prompt_lengths.observe(timing.prompt_tokens)
        self.output_lengths.observe(len(timing.token_times_s))
        for name, seconds in (
            ("ttft", timing.ttft_s),
            ("queue", timing.queue_s),
            ("prefill", timing.prefill_s),
            ("decode", timing.decode_s),
            ("tpot", timing.tpot_s),
            ("request", timing.total_s),
        ):
            if seconds is not None:
                self.times[name].observe(seconds)
        counts = self.itl.counts
        for gap_s in gaps_s:
            counts[bisect_left(BUCKETS_S, gap_s)] += 1
        self.itl.total_s += sum(gaps_s)

    def failed(self, num_samples: int) -> None:
        """These will never be finished: their engine ended."""
        if num_samples:
            self.requests.labels(FinishReason.ERROR.value).inc(num_samples)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """What is counted elsewhere. The engine's own is as it was last heard; a restarted one counts from zero, as
    counters may."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield GaugeMetricFamily("twostroke_engine_up", "1 when the engine takes requests", metrics.engine_up)
        restarts = CounterMetricFamily("twostroke_engine_restarts", "Engines started anew, by why", labels=["reason"])
        for reason, number in metrics.restarts.by_reason.items():
            restarts.add_metric([reason], number)
        yield restarts
        yield GaugeMetricFamily("twostroke_http_in_flight", "HTTP requests being answered", metrics.http_in_flight)
        yield GaugeMetricFamily("twostroke_viewers", "Pages that watch the engine's steps", metrics.viewers)
        itl = HistogramMetricFamily("twostroke_itl_seconds", "Between one advance of a stream and the next")
        itl.add_metric([], cumulative(BUCKETS_S, metrics.itl.counts), metrics.itl.total_s)
        yield itl
        yield GaugeMetricFamily(
            "twostroke_speculation_gained_seconds",
            "Decode seconds that drafts saved samples that ended, as predicted",
            metrics.gained_s,
        )
        if (stats := metrics.engine) is not None:
            yield from _queues(stats)
            yield from _kv(stats)
            if stats.tiers is not None:
                yield from _tiers(stats.tiers)
            if stats.handoffs is not None:
                yield from handoff_metrics(stats.handoffs)
            yield _steps(stats)
            yield from _drafts(stats)
            yield from _drafters(stats)
            if stats.step_cost_error is not None:
                yield GaugeMetricFamily(
                    "twostroke_step_cost_error_ratio",
                    "How far predictions of steps were off, of late: mean of |predicted - measured| / measured",
                    stats.step_cost_error,
                )


def _queues(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("twostroke_waiting", "Samples that wait to be admitted", stats.waiting)
    running = GaugeMetricFamily("twostroke_running", "Samples that run, by phase", labels=["phase"])
    running.add_metric(["prefill"], stats.running_prefill)
    running.add_metric(["decode"], stats.running_decode)
    yield running
    yield GaugeMetricFamily(
        "twostroke_prefill_backlog_tokens", "Known tokens that no launched step covers", stats.prefill_backlog_tokens
    )
    yield GaugeMetricFamily(
        "twostroke_prefill_backlog_seconds", "What reading those should take", stats.prefill_backlog_s
    )
    yield CounterMetricFamily("twostroke_preemptions", "Samples that lost their KV to older work", stats.preemptions)


def _kv(stats: Stats) -> Iterator[Metric]:
    blocks = GaugeMetricFamily("twostroke_kv_blocks", "KV blocks, by group and state", labels=["group", "state"])
    for group, (free, cached, used) in enumerate(stats.blocks):
        for state, number in (("free", free), ("cached", cached), ("used", used)):
            blocks.add_metric([str(group), state], number)
    yield blocks
    yield GaugeMetricFamily(
        "twostroke_kv_occupancy", "The share of KV blocks that running samples hold", kv_occupancy(stats)
    )
    yield GaugeMetricFamily("twostroke_kv_full_seconds", "Until KV should be full", stats.kv_full_s)
    looked_up, hit = stats.prefix_lookup_tokens, stats.prefix_hit_tokens
    yield CounterMetricFamily("twostroke_prefix_lookup_tokens", "Prompt tokens looked up in the cache", looked_up)
    yield CounterMetricFamily("twostroke_prefix_hit_tokens", "Of those, found", hit)


def _tiers(tiers: TierReport) -> Iterator[Metric]:
    hits = CounterMetricFamily("twostroke_kv_tier_hit_tokens", "Prompt tokens found, by tier", labels=["tier"])
    for tier, tokens in tiers.hit_tokens.items():
        hits.add_metric([tier], tokens)
    yield hits
    held = GaugeMetricFamily("twostroke_kv_tier_bytes", "KV that a tier holds", labels=["tier"])
    for tier, num_bytes in tiers.bytes.items():
        held.add_metric([tier], num_bytes)
    yield held
    blocks = CounterMetricFamily("twostroke_kv_tier_moved_blocks", "KV blocks moved, by move", labels=["move"])
    moved = CounterMetricFamily("twostroke_kv_tier_moved_bytes", "Their bytes", labels=["move"])
    for move, number in tiers.moved_blocks.items():
        blocks.add_metric([move], number)
        moved.add_metric([move], tiers.moved_bytes[move])
    yield blocks
    yield moved
    dropped = CounterMetricFamily("twostroke_kv_tier_dropped_blocks", "KV blocks given up, by why", labels=["reason"])
    for reason, number in tiers.dropped_blocks.items():
        dropped.add_metric([reason], number)
    yield dropped
    yield CounterMetricFamily(
        "twostroke_kv_tier_recomputed_tokens",
        "Tokens found in a tier and computed again, which was predicted to be faster",
        tiers.recomputed_tokens,
    )


def kv_occupancy(stats: Stats) -> float:
    total = sum(map(sum, stats.blocks))
    return sum(used for _, _, used in stats.blocks) / max(1, total)


def _steps(stats: Stats) -> Metric:
    family = HistogramMetricFamily("twostroke_step_seconds", "Backend seconds of a step, by kind", labels=["kind"])
    for kind, histogram in stats.steps.items():
        family.add_metric([kind], cumulative(STEP_BUCKETS_S, histogram.counts), histogram.total_s)
    return family


def _drafts(stats: Stats) -> Iterator[Metric]:
    labels = ["method", "position"]
    computed = CounterMetricFamily(
        "twostroke_drafts_computed", "Drafts computed, by method and position", labels=labels
    )
    held = CounterMetricFamily("twostroke_drafts_held", "Of those, tokens that the model chose", labels=labels)
    lengths = HistogramMetricFamily(
        "twostroke_accepted_length", "Tokens that a slot with drafts brought, its own among them", labels=["method"]
    )
    for method, counts in stats.drafts.items():
        for position, (tried, kept) in enumerate(zip(counts.computed, counts.held, strict=True), start=1):
            if tried:
                name = f"{position}" if position < DRAFT_POSITIONS else f"{position}+"
                computed.add_metric([method, name], tried)
                held.add_metric([method, name], kept)
        bounds = range(1, DRAFT_POSITIONS + 1)
        lengths.add_metric([method], cumulative(bounds, counts.lengths), counts.tokens)
    yield computed
    yield held
    yield lengths


def _drafters(stats: Stats) -> Iterator[Metric]:
    faults = CounterMetricFamily(
        "twostroke_drafter_faults", "Times that a drafter failed, each a turn that it lost", labels=["method"]
    )
    out = GaugeMetricFamily("twostroke_drafter_out", "1 while it is asked for nothing, as it failed", labels=["method"])
    doubted = GaugeMetricFamily(
        "twostroke_drafter_doubted", "1 once it was found to guess hardly ever right", labels=["method"]
    )
    for state in stats.drafters:
        faults.add_metric([state.name], state.num_faults)
        out.add_metric([state.name], state.is_out)
        doubted.add_metric([state.name], state.is_doubted)
    yield faults
    yield out
    yield doubted


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    names = (*map(floatToGoString, bounds), "+Inf")
    return list(zip(names, accumulate(counts), strict=True))
