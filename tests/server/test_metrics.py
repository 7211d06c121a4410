"""The numbers that Prometheus reads, parsed by its own client."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import RunningServer
from twostroke.core.events import TokenEvent
from twostroke.core.sequence import FinishReason
from twostroke.core.service_level import Promise
from twostroke.core.tier_report import TierReport
from twostroke.core.timing import SequenceTiming
from twostroke.server.level_metrics import judged
from twostroke.server.messages import STEP_BUCKETS_S, Stats, StepHistogram
from twostroke.server.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_finished_sample_is_counted_once_in_each() -> None:
    metrics = Metrics()
    timing = SequenceTiming(
        arrival_s=10.0,
        scheduled_s=10.3,
        token_times_s=[11.0, 11.1, 11.4],
        finished_s=11.4,
        prompt_tokens=20,
        cached_tokens=16,
    )
    metrics.finished(TokenEvent("r", 0, (1,), "x", finish_reason=FinishReason.STOP, timing=timing))
    metrics.finished(
        TokenEvent("r", 1, (), "", finish_reason=FinishReason.ABORT, timing=SequenceTiming(prompt_tokens=20))
    )
    found = samples(metrics.render().decode())
    assert found["twostroke_requests_total", (("reason", "stop"),)] == 1
    assert found["twostroke_requests_total", (("reason", "abort"),)] == 1
    assert found["twostroke_prompt_tokens_total", ()] == 20
    assert found["twostroke_cached_prompt_tokens_total", ()] == 16
    assert found["twostroke_output_tokens_total", ()] == 3
    for name, seconds in (("ttft", 1.0), ("queue", 0.3), ("prefill", 0.7), ("tpot", 0.2), ("request", 1.4)):
        assert found[f"twostroke_{name}_seconds_sum", ()] == pytest.approx(seconds)
        assert found[f"twostroke_{name}_seconds_count", ()] == 1
    assert found["twostroke_itl_seconds_count", ()] == 2
    assert found["twostroke_itl_seconds_bucket", (("le", "0.2"),)] == 1


def test_a_prompt_that_was_left_to_another_engine_is_nobodys_work_here() -> None:
    metrics, promise = Metrics(), Promise("chat", 0.5, 0.1)
    before = samples(metrics.render().decode())
    timing = SequenceTiming(arrival_s=10.0, finished_s=10.0, prompt_tokens=20, promise=promise, is_left=True)
    metrics.finished(TokenEvent("r", 0, (), "", finish_reason=FinishReason.LENGTH, timing=timing))
    assert samples(metrics.render().decode()) == before


def test_the_engine_speaks_through_its_last_stats() -> None:
    metrics = Metrics()
    counts = [0] * (len(STEP_BUCKETS_S) + 1)
    counts[0], counts[3], counts[-1] = 2, 1, 1
    metrics.engine = Stats(1, 2, 3, 40, 5, 60, 80, ((10, 20, 30), (40, 0, 0)), {"decode": StepHistogram(counts, 12.5)})
    assert "step_cost" not in metrics.render().decode()  # nothing was predicted yet
    metrics.engine = msgspec.structs.replace(metrics.engine, step_cost_error=0.08)
    found = samples(metrics.render().decode())
    assert found["twostroke_step_cost_error_ratio", ()] == 0.08
    assert found["twostroke_running", (("phase", "prefill"),)] == 2
    assert found["twostroke_prefill_backlog_tokens", ()] == 40
    assert found["twostroke_kv_blocks", (("group", "0"), ("state", "used"))] == 30
    assert found["twostroke_kv_occupancy", ()] == pytest.approx(0.3)
    assert found["twostroke_step_seconds_bucket", (("kind", "decode"), ("le", "0.005"))] == 3
    assert found["twostroke_step_seconds_bucket", (("kind", "decode"), ("le", "+Inf"))] == 4
    assert found["twostroke_step_seconds_sum", (("kind", "decode"),)] == 12.5


def families_with_tiers() -> set[str]:
    """All that an engine with tiers for KV tells."""
    one = {"disk": 1}
    metrics = Metrics()
    tiers = TierReport(one, one, one, one, one, one, one, recomputed_tokens=1)
    metrics.engine = Stats(1, 2, 3, 40, 5, 60, 80, ((10, 20, 30),), {}, tiers=tiers)
    return {family.name for family in text_string_to_metric_families(metrics.render().decode())}


def test_the_dashboard_shows_what_tiers_hit_move_and_give_up() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    shown = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ()))
    told = {name for name in families_with_tiers() if "_kv_tier_" in name}
    assert len(told) == 6
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for name in told:
        assert f"`{name}" in documented, f"docs/metrics.md does not define {name}"
    for name in ("hit_tokens", "moved_bytes", "dropped_blocks", "recomputed_tokens"):
        assert f"twostroke_kv_tier_{name}_total" in shown
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places) == len({panel["id"] for panel in dashboard["panels"]})


def test_every_metric_is_defined_and_the_dashboard_asks_for_none_that_is_not(server: RunningServer) -> None:
    server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 3})
    families = {family.name for family in text_string_to_metric_families(server.get("/metrics").text)}
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for name in families:
        assert f"`{name}" in documented, f"docs/metrics.md does not define {name}"
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(expressions) > 10
    import re

    families |= families_with_tiers()
    for expression in expressions:
        for name in re.findall(r"twostroke_\w+", expression):
            assert re.sub(r"_(total|bucket|sum|count)$", "", name) in families, name


@pytest.mark.parametrize(
    ("reason", "first_s", "finished_s", "expected"),
    [
        (FinishReason.STOP, 0.4, 2.0, (True, True)),
        (FinishReason.STOP, 0.6, 2.0, (False, True)),
        (FinishReason.ABORT, None, 0.4, (None, None)),  # it left before its time was over
        (FinishReason.ABORT, None, 0.6, (False, None)),
        (FinishReason.ERROR, None, 0.1, (False, None)),
        (FinishReason.ABORT, 0.4, 0.9, (True, True)),
    ],
)
def test_a_promise_is_judged_where_something_can_be_said(
    reason: FinishReason, first_s: float | None, finished_s: float, expected: tuple[bool | None, bool | None]
) -> None:
    times_s = [] if first_s is None else [10.0 + first_s, 10.0 + first_s + 0.05]
    timing = SequenceTiming(
        arrival_s=10.0, token_times_s=times_s, finished_s=10.0 + finished_s, promise=Promise("chat", 0.5, 0.1)
    )
    assert judged(timing, timing.itl_s, reason) == expected
    metrics = Metrics()
    metrics.finished(TokenEvent("r", 0, (), "", finish_reason=reason, timing=timing))
    found = samples(metrics.render().decode())
    good = found.get(("twostroke_good_requests_total", (("service_level", "chat"),)), 0.0)
    assert good == (expected == (True, True) and reason is FinishReason.STOP)
    assert found["twostroke_level_requests_total", (("reason", reason.value), ("service_level", "chat"))] == 1
