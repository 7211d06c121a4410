"""A server that keeps KV on disk: after a restart each key finds its own prompts again, and no other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL_OPTIONS
from tests.server.running import RunningServer, running_server
from tests.server.test_metrics import ROOT, samples
from twostroke.core.tier_report import TierReport
from twostroke.server.messages import Stats, decode_from_engine, encode
from twostroke.server.metrics import Metrics

PROMPT = "Two phases make one answer: the prompt is read, then tokens are written one by one. " * 20


def ask(server: RunningServer, key: str) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    answer = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
@pytest.mark.usefixtures("smollm2_path")
def test_each_key_finds_its_own_prompts_after_a_restart(tmp_path: Path) -> None:
    options = (*MODEL_OPTIONS, "--kv-disk", str(tmp_path / "kv"), "--kv-disk-gb", "1")
    texts = []
    for number in range(2):
        with running_server(tmp_path / f"log{number}", *options, TWOSTROKE_API_KEYS="one,two") as server:
            answer = ask(server, "one")
            texts.append(answer["choices"][0]["text"])
            prefill = answer["timing"]["prefill"]
            if number == 0:
                assert prefill["cached_by_tier"] == {}
                continue
            cached = prefill["cached_tokens"]
            assert cached > 250 and prefill["cached_by_tier"] == {"disk": cached}
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            other = ask(server, "two")
            assert other["timing"]["prefill"]["cached_tokens"] == 0
            texts.append(other["choices"][0]["text"])
            metrics = server.get("/metrics", headers={"Authorization": "Bearer one"}).text
            documented = (ROOT / "docs" / "metrics.md").read_text()
            tiered = [one.name for one in text_string_to_metric_families(metrics) if "_kv_tier_" in one.name]
            assert len(tiered) == 6 and all(f"`{name}" in documented for name in tiered)
    assert len(set(texts)) == 1


def test_what_tiers_hold_and_move_reaches_prometheus() -> None:
    report = TierReport(
        hit_tokens={"device": 16, "host": 32, "disk": 48},
        bytes={"host": 1000, "disk": 2000},
        blocks={"host": 10, "disk": 20},
        limit_bytes={"host": 4000, "disk": 8000},
        moved_blocks={"spilled": 1, "loaded": 2, "written": 3, "fetched": 4},
        moved_bytes={"spilled": 10, "loaded": 20, "written": 30, "fetched": 40},
        dropped_blocks={"busy": 5, "unwritten": 6, "damaged": 7},
        recomputed_tokens=64,
    )
    stats = Stats(1, 2, 3, 40, 5, 60, 80, ((10, 20, 30),), {}, tiers=report)
    metrics = Metrics()
    metrics.engine = msgspec.structs.replace(stats, tiers=None)
    assert "kv_tier" not in metrics.render().decode()
    received = decode_from_engine(encode(stats))
    assert isinstance(received, Stats) and received == stats
    metrics.engine = received
    found = samples(metrics.render().decode())
    assert found["twostroke_kv_tier_hit_tokens_total", (("tier", "disk"),)] == 48
    assert found["twostroke_kv_tier_bytes", (("tier", "host"),)] == 1000
    assert found["twostroke_kv_tier_moved_blocks_total", (("move", "fetched"),)] == 4
    assert found["twostroke_kv_tier_moved_bytes_total", (("move", "spilled"),)] == 10
    assert found["twostroke_kv_tier_dropped_blocks_total", (("reason", "damaged"),)] == 7
    assert found["twostroke_kv_tier_recomputed_tokens_total", ()] == 64
