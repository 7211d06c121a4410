"""`twostroke fleet deploy` on a real Ray of this machine: a pool that grows under a burst and shrinks again without a
failed request, a child that is killed and replaced, and no process left in the end. Skipped where there is no Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray")
pytest.importorskip("smg")

from tests.cluster.routing import descendants, is_alive, until
from twostroke.cluster.fleet import free_port
from twostroke.cluster.keys import FLEET_KEY_VARIABLE, new_fleet_key, router_key
from twostroke.cluster.router_client import RouterClient

pytestmark = [pytest.mark.fleet, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()", "fleet", "deploy"]
BURST_S = 40.0
FILE = """
model = "smollm2"
drain_s = 10
options = ["--backend", "cpu", "--max-context", "1024", "--kv-memory", "100MB"]
[router]
port = {port}
[pools.both]
min = 1
max = 2
cpus = 0.5
options = ["--threads", "1"]
[scaling]
start_s = 5
settle_s = 5
hold_s = 25
"""


def ask(url: str, text: str) -> int:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 24}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180).status_code


def ask_on(url: str, number: int) -> list[int]:
    until_s, found = time.monotonic() + BURST_S, []
    while time.monotonic() < until_s:
        found.append(ask(url, f"{number} {len(found)} " + "tell me a story about the sea. " * 40))
    return found


def server_of(pids: set[int], url: str) -> int:
    """The process that listens there, by its arguments."""
    port = url.rpartition(":")[2].encode()
    for pid in pids:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"serve" in arguments and port in arguments and not any(b"twostroke.cluster" in one for one in arguments):
            return pid
    raise AssertionError(f"nobody listens at {url}")


def test_a_pool_follows_its_load(smollm2_path: Path, tmp_path: Path) -> None:
    port, key, log = free_port(), new_fleet_key(), tmp_path / "log"
    (tmp_path / "fleet.toml").write_text(FILE.format(port=port))
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), FLEET_KEY_VARIABLE: key}
    with log.open("wb") as file:
        command = [*COMMAND, str(tmp_path / "fleet.toml")]
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    started: set[int] = set()
    try:
        until(lambda: "ready: the router is at" in log.read_text() or process.poll() is not None, 180, log.read_text)
        client = RouterClient(url, router_key(key))

        def well() -> list[str]:
            return [worker.url for worker in client.workers() if worker.is_healthy]

        until(lambda: len(well()) == 1, 60, log.read_text)
        with ThreadPoolExecutor(16) as pool:
            statuses = [status for found in pool.map(lambda n: ask_on(url, n), range(16)) for status in found]
        assert set(statuses) == {200}, statuses
        assert "both: 2 running" in log.read_text()
        until(lambda: log.read_text().rstrip().endswith("both: 1 running"), 120, log.read_text)
        until(lambda: len(well()) == 1, 60, log.read_text)
        started = descendants(process.pid)
        [before] = well()
        os.kill(server_of(started, before), signal.SIGKILL)
        until(lambda: well() and before not in well(), 120, log.read_text)
        assert ask(url, "Still there?") == 200
        assert before not in [worker.url for worker in client.workers() if not worker.is_leaving]
        started |= descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 130
    finally:
        started |= descendants(process.pid) if process.poll() is None else set()
        process.kill()
        process.wait()
        until(lambda: not any(map(is_alive, started)), 60)
