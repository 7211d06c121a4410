"""The server's numbers under vLLM's names, for gateways, autoscalers and dashboards that scrape those. Made when they
are asked for from what `metrics.py` has: nothing is counted twice. A name stands here only where it means the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from twostroke.core.sequence import FinishReason
from twostroke.server.messages import Ready, Stats
from twostroke.server.metrics import BUCKETS_S, Metrics, cumulative, kv_occupancy

TIMES = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:request_time_per_output_token_seconds": "tpot",
    "vllm:e2e_request_latency_seconds": "request",
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
    "vllm:request_decode_time_seconds": "decode",
}
"""By vLLM's name, ours."""
GAP_NAMES = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""The second is the older name, which recipes still ask for."""
KV_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
"""The second is the older name, which recipes still ask for."""


class VllmMetrics(Collector):
    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._labels = {"model_name": model_name, "engine": "0"}
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        for name, own in TIMES.items():
            yield self._renamed(metrics.times[own], name)
        yield self._renamed(metrics.prompt_lengths, "vllm:request_prompt_tokens")
        yield self._renamed(metrics.output_lengths, "vllm:request_generation_tokens")
        for name in GAP_NAMES:
            yield self._gaps(name)
        yield self._counter("vllm:prompt_tokens", _value(metrics.prompt_tokens))
        yield self._counter("vllm:generation_tokens", _value(metrics.output_tokens))
        yield self._successes()
        if (stats := metrics.engine) is not None:
            yield from self._standing(stats)
        if metrics.facts is not None:
            yield self._cache_config(metrics.facts)

    def _standing(self, stats: Stats) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", stats.running_prefill + stats.running_decode)
        yield self._gauge("vllm:num_requests_waiting", stats.waiting)
        for name in KV_NAMES:
            yield self._gauge(name, kv_occupancy(stats))
        yield self._counter("vllm:prefix_cache_queries", stats.prefix_lookup_tokens)
        yield self._counter("vllm:prefix_cache_hits", stats.prefix_hit_tokens)
        yield self._counter("vllm:num_preemptions", stats.preemptions)

    def _successes(self) -> Metric:
        family = Metric("vllm:request_success", "As twostroke_requests, but for errors", "counter")
        for sample in _samples(self._metrics.requests):
            reason = sample.labels.get("reason", FinishReason.ERROR.value)
            if reason != FinishReason.ERROR.value:
                labels = {**self._labels, "finished_reason": reason}
                family.add_sample("vllm:request_success_total", labels, sample.value)
        return family

    def _cache_config(self, facts: Ready) -> Metric:
        """A constant 1 whose labels say how large KV is: of several groups, the smallest."""
        num_blocks = min(facts.engine.num_blocks)
        labels = {"block_size": str(facts.engine.block_size), "num_gpu_blocks": str(num_blocks)}
        return self._gauge("vllm:cache_config_info", 1, labels)

    def _gauge(self, name: str, value: float, more: Mapping[str, str] | None = None) -> Metric:
        family = Metric(name, "As vLLM has it", "gauge")
        family.add_sample(name, {**self._labels, **(more or {})}, value)
        return family

    def _counter(self, name: str, value: float) -> Metric:
        family = Metric(name, "As vLLM has it", "counter")
        family.add_sample(f"{name}_total", dict(self._labels), value)
        return family

    def _gaps(self, name: str) -> Metric:
        family, itl = Metric(name, "As twostroke_itl_seconds", "histogram"), self._metrics.itl
        buckets = cumulative(BUCKETS_S, itl.counts)
        for bound, count in buckets:
            family.add_sample(f"{name}_bucket", {**self._labels, "le": bound}, count)
        family.add_sample(f"{name}_count", dict(self._labels), buckets[-1][1])
        family.add_sample(f"{name}_sum", dict(self._labels), itl.total_s)
        return family

    def _renamed(self, histogram: Histogram, name: str) -> Metric:
        (own,) = histogram.collect()
        family = Metric(name, f"As {own.name}", "histogram")
        for sample in own.samples:
            suffix = sample.name.removeprefix(own.name)
            family.add_sample(name + suffix, {**self._labels, **sample.labels}, sample.value)
        return family


def _samples(counter: Counter) -> list[Sample]:
    (family,) = counter.collect()
    return family.samples


def _value(counter: Counter) -> float:
    return sum(sample.value for sample in _samples(counter))
