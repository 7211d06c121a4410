"""The same numbers under vLLM's names: those that scrapers ask for, with the types and labels that they expect."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.core.timing import SequenceTiming
from twostroke.server.messages import Stats
from twostroke.server.metrics import Metrics
from twostroke.server.vllm_metrics import VllmMetrics

LABELS = {"model_name": "small", "engine": "0"}
SCRAPED = {
    # the endpoint picker of the inference gateway, and of llm-d
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    # autoscalers and their recipes
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:request_success": "counter",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:time_per_output_token_seconds": "histogram",
    # dashboards
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


def test_every_name_that_scrapers_read_says_what_ours_says() -> None:
    metrics = Metrics()
    VllmMetrics(metrics, "small")
    timing = SequenceTiming(
        arrival_s=10.0, scheduled_s=10.3, token_times_s=[11.0, 11.1, 11.4], finished_s=11.4, prompt_tokens=20
    )
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ERROR):
        metrics.finished(TokenEvent("r", 0, (1,), "x", finish_reason=reason, timing=timing))
    metrics.engine = Stats(1, 2, 3, 40, 5, 60, 80, ((10, 20, 30), (40, 0, 0)), {})
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert {name: families[name].type for name in SCRAPED} == SCRAPED
    found = {}
    for name in SCRAPED:
        for sample in families[name].samples:
            assert {key: sample.labels.pop(key) for key in LABELS} == LABELS
            found[sample.name, *sample.labels.values()] = sample.value
    assert found["vllm:num_requests_running",] == 5 and found["vllm:num_requests_waiting",] == 1
    assert found["vllm:kv_cache_usage_perc",] == found["vllm:gpu_cache_usage_perc",] == 0.3
    assert found["vllm:prefix_cache_queries_total",] == 80 and found["vllm:prefix_cache_hits_total",] == 60
    assert found["vllm:num_preemptions_total",] == 5
    assert found["vllm:prompt_tokens_total",] == 80 and found["vllm:generation_tokens_total",] == 12
    assert found["vllm:request_success_total", "length"] == 2 and found["vllm:request_success_total", "stop"] == 1
    assert ("vllm:request_success_total", "error") not in found
    assert found["vllm:request_prompt_tokens_sum",] == 80 and found["vllm:request_prompt_tokens_count",] == 4
    ours = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families.values()
        for sample in family.samples
    }
    pairs = {"time_to_first_token": "ttft", "inter_token_latency": "itl", "request_queue_time": "queue"}
    for name, own in pairs.items():
        same = {key[1:]: value for key, value in found.items() if key[0] == f"vllm:{name}_seconds_bucket"}
        assert same == {key[1:]: value for key, value in ours.items() if key[0] == f"twostroke_{own}_seconds_bucket"}
        assert found[f"vllm:{name}_seconds_sum",] == ours[f"twostroke_{own}_seconds_sum",]
        assert found[f"vllm:{name}_seconds_count",] == ours[f"twostroke_{own}_seconds_count",]


def test_without_an_engine_nothing_is_said_of_it() -> None:
    metrics = Metrics()
    VllmMetrics(metrics, "small")
    assert "vllm:num_requests_running" not in metrics.render().decode()
