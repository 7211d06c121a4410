"""`/v1/loads`: the fields that smg reads, from the same snapshot as /metrics, and guarded like it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke.core.kv_layout import KVGroup
from twostroke.core.step_record import StepTotals
from twostroke.server.loads import load_of
from twostroke.server.messages import Stats
from twostroke.server.metrics import Metrics
from twostroke.server.recent import Recent

SMG_READS = {
    *("dp_rank", "num_running_reqs", "num_waiting_reqs", "num_waiting_uncached_tokens", "num_used_tokens"),
    *("max_total_num_tokens", "token_usage", "gen_throughput"),
}
KEY = {"Authorization": "Bearer one"}


def facts(*groups: KVGroup) -> Any:
    return SimpleNamespace(engine=SimpleNamespace(max_running=8, block_size=16), kv_groups=groups)


def test_it_says_what_the_engine_last_said() -> None:
    stats = Stats(1, 2, 3, 40, 5, 60, 80, ((10, 20, 30), (0, 50, 50)), {})
    load = load_of(Metrics(), stats, facts(KVGroup((0,), None, 60), KVGroup((1,), 64, 100)))
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (5, 1, 6)
    assert load.num_waiting_uncached_tokens == 40 and load.cache_hit_rate == 0.75
    assert (load.num_used_tokens, load.max_total_num_tokens) == (480, 960), "of the group that is fullest"
    assert load.token_usage == 0.5 and load.utilization == 0.625 and load.max_running_requests == 8


def test_a_state_is_no_block_of_tokens() -> None:
    stats = Stats(0, 0, 2, 0, 0, 0, 0, ((90, 0, 10), (0, 0, 2)), {})
    load = load_of(Metrics(), stats, facts(KVGroup((0,), None, 100), KVGroup((1,), None, 2, "state", values=64)))
    assert (load.num_used_tokens, load.max_total_num_tokens) == (160, 1600)


def test_the_rate_is_of_the_last_minute() -> None:
    now_s = [100.0]
    recent = Recent(clock=lambda: now_s[0])
    assert recent.written_per_s() == 0.0
    recent.stood(StepTotals(steps=1, decode_slots=10))
    now_s[0] += 4.0
    recent.stood(StepTotals(steps=9, decode_slots=40, drafts_held=10))
    assert recent.written_per_s() == 10.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("scripted")
    model = str(make_scripted(folder / "model", "hermes"))
    with running_server(folder / "log", model, "--backend", "reference", TWOSTROKE_API_KEYS="one") as running:
        yield running


def test_the_route_is_guarded_as_metrics_are(server: RunningServer, tmp_path: Path) -> None:
    assert server.get("/v1/loads").status_code == server.get("/metrics").status_code == 401
    answer = server.get("/v1/loads", headers=KEY)
    assert answer.status_code == 200 and answer.json()["dp_rank_count"] == 1 and answer.json()["role"] == "both"
    [load] = answer.json()["loads"]
    assert load.keys() >= SMG_READS and load["num_running_reqs"] == 0
    tokens = server.metric("twostroke_kv_blocks", headers=KEY) * 16
    assert load["max_total_num_tokens"] == tokens
    assert server.metric("twostroke_http_responses_total", headers=KEY, route="/v1/loads") == 2
