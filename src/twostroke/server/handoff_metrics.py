"""What an engine of a fleet does for others and has from them, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from twostroke.core.handoff import HandoffTotals


def handoff_metrics(totals: HandoffTotals) -> Iterator[Metric]:
    yield GaugeMetricFamily("twostroke_kv_leases", "Prompts whose KV is kept for other engines", totals.leases)
    handoffs = CounterMetricFamily("twostroke_handoffs", "Prompts read for others, or by them", labels=["outcome"])
    for outcome in ("granted", "left", "taken", "expired", "fetched", "refused", "failed"):
        handoffs.add_metric([outcome], getattr(totals, outcome))
    yield handoffs
    yield CounterMetricFamily("twostroke_handoff_granted_tokens", "Read for others", totals.granted_tokens)
    yield CounterMetricFamily("twostroke_handoff_fetched_tokens", "Read by others", totals.fetched_tokens)
    yield CounterMetricFamily("twostroke_handoff_fetched_bytes", "KV of those", totals.fetched_bytes)
    yield CounterMetricFamily("twostroke_handoff_fetch_seconds", "What fetching it took", totals.fetch_s)
    yield GaugeMetricFamily(
        "twostroke_kv_early_blocks", "Blocks of prompts that others are still reading", totals.early_blocks
    )
    yield CounterMetricFamily("twostroke_handoff_early_bytes", "Of those fetched, before asked for", totals.early_bytes)
    yield CounterMetricFamily("twostroke_handoff_unused_bytes", "That came early, for nobody", totals.unused_bytes)
    yield CounterMetricFamily("twostroke_handoff_refused_announcements", "By others, of KV", totals.unheard)
