"""`top` and `explain` at a router's address, as a user types them: two pools as one, and one request's time on both
machines."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("smg")

from tests.cluster.fleets import WORDS, read, servers, write
from tests.cluster.test_fleet import prompt_of
from tests.cluster.test_fleet_up import COMMAND, Running, environment, fleet

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
POOLS = ("--prefill", "1", "--decode", "1", "--kv-host-gb", "0.3", "--threads", "1")


def command(running: Running, *arguments: str, knows_key: bool = True) -> subprocess.CompletedProcess[str]:
    cache = running.cache if knows_key else running.cache / "another"
    asked = [*COMMAND[:-1], *arguments, "--url", running.url]
    return subprocess.run(asked, capture_output=True, text=True, env=environment(cache), timeout=60)


@pytest.mark.parametrize("router", ["smg", "vllm-router"])
def test_a_fleet_is_looked_at_by_its_routers_address(smollm2_path: Path, tmp_path: Path, router: str) -> None:
    if router == "vllm-router":
        pytest.importorskip("vllm_router")
    with fleet(tmp_path, smollm2_path, *POOLS, "--router", router) as running:
        client = running.client()
        name = client.models.list().data[0].id
        answers = [
            client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": " ".join(WORDS[place : place + 150])}],
                max_tokens=8,
                temperature=0,
            )
            for place in (0, 200)
        ]
        shown = command(running, "top", "--once", "--interval", "0.2")
        assert shown.returncode == 0, shown.stderr
        lines = shown.stdout.splitlines()
        assert lines[0].startswith(f"{running.url}: 2 workers of ")
        if router == "smg":  # the other does not say who does what
            assert [line.split()[0] for line in lines[2:4]] == ["prefill", "decode"]
        assert sum("  ready  " in line for line in lines) == 2
        for answer in answers:
            assert any(line.startswith(answer.id[:17]) and " ms " in line for line in lines), shown.stdout

        for request in (answers[0].id, "last"):
            explained = command(running, "explain", request)
            assert explained.returncode == 0, explained.stderr
            after_reading = (
                ("handoff (KV) ", "GB/s") if request != "last" else (" came over ",)
            )  # of later ones, or not
            for part in ("Handoff: ", "prefill there ", "decode (write) ", *after_reading):
                assert part in explained.stdout, explained.stdout
        assert answers[-1].id in command(running, "explain", "last").stdout
        nobody = command(running, "explain", "chatcmpl-none")
        assert nobody.returncode == 2
        assert f"none of the 2 workers at {running.url} remembers a finished request 'chatcmpl-none'" in nobody.stderr
        if router == "smg":
            refused = command(running, "top", "--once", knows_key=False)
            assert refused.returncode == 2 and "set TWOSTROKE_ROUTER_KEY" in refused.stderr


def test_who_waited_for_the_worker_that_reads_is_told_so(smollm2_path: Path, tmp_path: Path) -> None:
    """The verdict and the promise count from the arrival there, though another worker answers."""
    levels = tmp_path / "levels.toml"
    levels.write_text("[levels.chat]\nttft_ms = 200\n")
    options = ("--service-levels", str(levels), "--max-running", "1", "--policy", "fifo")
    path, asked = "/v1/completions", {**prompt_of(70, 200), "service_level": "chat"}
    with servers(tmp_path, "prefill", "decode", options=options) as (reader, writer):
        with ThreadPoolExecutor(5) as pool:
            ahead = [pool.submit(read, reader, path, prompt_of(60 + place, 600)) for place in range(4)]
            reader.wait_until(lambda: reader.metric("twostroke_waiting") >= 2)
            params = pool.submit(read, reader, path, asked).result()
            assert all(leg.result() for leg in ahead)
        timing = write(writer, path, asked, params).json()["timing"]
        handoff = timing["handoff"]
        assert handoff["why_not"] is None and handoff["queue_s"] > 0.2
        assert timing["ttft_s"] > handoff["read_s"] > handoff["queue_s"] and timing["total_s"] > timing["ttft_s"]
        assert timing["verdict"].startswith("slow to start: ") and timing["cause"] == "queue", timing["verdict"]
        assert f"went into the queue of {handoff['read_by']}, which read its prompt" in timing["verdict"]
        assert timing["kept"]["ttft"] is False
        assert "promises a first token in 200 ms, and it came in " in timing["promise"]
        assert f"went into the queue of {handoff['read_by']}" in timing["promise"]
        kept, broken = (writer.metric("twostroke_promises_total", outcome=one) for one in ("kept", "broken"))
        assert (kept, broken) == (0, 1)
