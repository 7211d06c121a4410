"""`twostroke plan --from-server` against a server that has really answered: what it reads, and what it makes of it."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.test_cli import twostroke
from tests.server.running import RunningServer
from twostroke.config import EngineConfig
from twostroke.core.errors import BadRequestError
from twostroke.planner.asked.here import here
from twostroke.planner.asked.model import read_model
from twostroke.planner.live import calibrate, fetch_metrics, parse_metrics


@pytest.fixture(scope="module")
def pages(server: RunningServer) -> tuple[str, str]:
    """The metrics page before and after a dozen requests, two at a time: the server has served other tests too."""
    draw = random.Random(5)

    def ask(_: int) -> None:
        prompt = " ".join(str(draw.randrange(10_000)) for _ in range(60))
        body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        assert server.post("/v1/completions", body).status_code == 200

    server.wait_until_idle()
    before = server.get("/metrics").text
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ask, range(12)))
    server.wait_until_idle()
    return before, server.get("/metrics").text


@pytest.fixture(scope="module")
def busy_server(server: RunningServer, pages: tuple[str, str]) -> RunningServer:
    """One that has answered them."""
    return server


def between(before: str, after: str) -> str:
    """A page of what was counted from one page to the other."""

    def counted(page: str) -> dict[str, float]:
        lines = [line.rpartition(" ") for line in page.splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}

    earlier = counted(before)
    return "\n".join(f"{name} {value - earlier.get(name, 0.0)!r}" for name, value in counted(after).items())


def test_the_page_is_read_as_prometheus_reads_it(busy_server: RunningServer) -> None:
    metrics = fetch_metrics(busy_server.address)
    samples = {
        (sample.name, sample.labels.get("kind", "")): sample.value
        for family in text_string_to_metric_families(busy_server.get("/metrics").text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    assert metrics.requests == samples["twostroke_ttft_seconds_count", ""] >= 12
    assert metrics.output_tokens == samples["twostroke_output_tokens_total", ""] >= 12 * 24
    assert metrics.prompt_tokens == samples["twostroke_prompt_tokens_total", ""]
    for kind in ("prefill", "decode", "mixed"):
        assert metrics.steps[kind].count == samples["twostroke_step_seconds_count", kind]
        assert metrics.steps[kind].total_s == samples["twostroke_step_seconds_sum", kind]
    count, total_s = (samples[f"twostroke_tpot_seconds_{name}", ""] for name in ("count", "sum"))
    assert metrics.tpot_s == pytest.approx(total_s / count)


def test_its_share_of_the_floor_is_plausible(pages: tuple[str, str]) -> None:
    deployment, _ = here(read_model("smollm2"), None, "bf16", 1, EngineConfig())
    metrics = parse_metrics(between(*pages))
    assert (metrics.requests, metrics.output_tokens) == (12, 12 * 24)
    found = calibrate(deployment, metrics, "a test's server")
    # Two busy cores reach a part of it. No step beats physics, but ceilings are measured, perhaps in a busy moment.
    assert 1e-4 < found.shares.prefill < 5 and 1e-4 < found.shares.decode < 5
    # Steps and requests are timed apart, but it is the same dozen: both tell a story of the same size. On a busy
    # machine a few steps take most of the time, and weigh more in one of them.
    assert {name for name, _, _ in found.checks} == {"prefill", "TPOT"}
    for name, measured, predicted in found.checks:
        assert measured / 50 < predicted < 50 * measured, (name, measured, predicted)


def test_as_a_user_types_it(busy_server: RunningServer) -> None:
    done = twostroke("plan", "smollm2", "--on", "this", "--from-server", busy_server.base_url, "--users", "2")
    assert done.returncode == 0, done.stderr
    assert "of the floor" in done.stdout and "its TPOT" in done.stdout and "its queue" in done.stdout
    done = twostroke("plan", "smollm2", "--on", "this", "--from-server", busy_server.address, "--json")
    record = json.loads(done.stdout)
    assert record["efficiency"]["source"] == f"the metrics of {busy_server.address}"
    assert "against the means of the" in record["efficiency"]["error"]
    assert record["alone"]["tpot"]["expected_s"] > 0


def test_the_address_may_be_any_of_the_servers(busy_server: RunningServer) -> None:
    counts = {
        fetch_metrics(url).requests
        for url in (busy_server.address + "/", busy_server.base_url, busy_server.address + "/metrics")
    }
    assert len(counts) == 1
    with pytest.raises(BadRequestError, match="answered 404"):
        fetch_metrics(busy_server.address + "/nothing/here")
