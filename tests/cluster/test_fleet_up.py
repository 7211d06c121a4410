"""`twostroke fleet up` as a user types it: two plain workers behind smg, a client that notices nothing when one of them
is killed, and no process left after Ctrl-C, nor after the fleet itself was killed."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from openai import OpenAI

pytest.importorskip("smg")

from tests.cluster.routing import descendants, is_alive, until
from tests.server.running import CLIENT

pytestmark = [pytest.mark.fleet, pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")]
COMMAND = [sys.executable, "-c", "from twostroke.cli import main; main()", "fleet"]
OPTIONS = (
    "--port",
    "0",
    "--backend",
    "cpu",
    "--max-context",
    "1024",
    "--kv-memory",
    "100MB",
    "--drain",
    "10",
    "--check-steps",
)
START_S = 240.0


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    log: Path
    url: str
    cache: Path

    def pids(self, role: str) -> list[int]:
        """Of the table that was printed."""
        return [
            int(pid) for pid in re.findall(rf"^{role}\S*(?: \(\S+\))? +http://\S+ +(\d+)", self.said(), re.MULTILINE)
        ]

    def said(self) -> str:
        return self.log.read_text()

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def num_running(self, place: int) -> int:
        """Requests at a worker, as it says itself."""
        url = re.findall(r"^both +(http://\S+)", self.said(), re.MULTILINE)[place]
        running: int = CLIENT.get(f"{url}/v1/loads").json()["loads"][0]["num_running_reqs"]
        return running

    def status(self) -> str:
        done = subprocess.run(
            [*COMMAND, "status"], capture_output=True, text=True, env=environment(self.cache), timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160", "TWOSTROKE_CACHE": str(cache)}


@contextmanager
def fleet(folder: Path, model: Path, *arguments: str) -> Iterator[Running]:
    log, cache = folder / "log", folder / "cache"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, "up", str(model), *OPTIONS, *arguments], stdout=file, stderr=file, env=environment(cache)
        )
    try:
        until(lambda: "ready at" in log.read_text() or process.poll() is not None, START_S, log.read_text)
        found = re.search(r"ready at (http://\S+)/v1", log.read_text())
        assert found is not None, log.read_text()
        yield Running(process, log, found[1], cache)
    finally:
        started = descendants(process.pid) if process.poll() is None else set()
        process.kill()
        process.wait()
        until(lambda: not any(map(is_alive, started)), 20)


def ask(client: OpenAI, model: str, text: str, max_tokens: int = 8) -> str:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=max_tokens,
        temperature=0,
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("router", ["smg", "vllm-router"])
def test_two_workers_one_of_which_is_killed(smollm2_path: Path, tmp_path: Path, router: str) -> None:
    if router == "vllm-router":
        pytest.importorskip("vllm_router")
    with fleet(tmp_path, smollm2_path, "--workers", "2", "--router", router) as running:
        client, workers = running.client(), running.pids("both")
        assert len(workers) == 2 and len(running.pids("router")) == 1
        for pid in descendants(running.process.pid):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            assert not any(key.encode() in arguments for key in keys_of(running)), "no key is an argument"
        name = client.models.list().data[0].id
        assert ask(client, name, "Say hello.")
        if router == "smg":
            shown = running.status()
            assert "2 workers" in shown and shown.count("http://127.0.0.1") == 3 and "ok" in shown
        with ThreadPoolExecutor(20) as pool:
            before = [pool.submit(ask, client, name, f"{number}: count to a thousand.", 96) for number in range(8)]
            until(lambda: running.num_running(0) > 0 and running.num_running(1) > 0, said=running.said)
            os.kill(workers[0], signal.SIGKILL)
            after = [pool.submit(ask, client, name, f"And then to {number}.") for number in range(12)]
            lost, lost_later = ([one.exception() for one in asked if one.exception()] for asked in (before, after))
        print(f"{router}: lost {len(lost)} of 8 in flight, {len(lost_later)} of 12 that came later")
        if router == "smg":  # the other does not ask another worker for every request: docs/fleet.md
            assert lost == lost_later == [], "what the killed worker had is asked of another"
        until(lambda: "was started again, as process" in running.said(), 60, running.said)
        assert "died (signal SIGKILL)" in running.said()
        if router == "smg":
            until(lambda: running.status().count(" ok ") == 2, 90, running.status)
        assert ask(client, name, "Still there?")
        started = descendants(running.process.pid)
        assert len(started) >= 5
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(60) == 0
        assert "all have ended" in running.said() and not any(map(is_alive, started))
        assert not list(running.cache.glob("fleets/*/key"))


def keys_of(running: Running) -> list[str]:
    [path] = running.cache.glob("fleets/*/key")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    from twostroke.cluster.keys import read_secret, router_key

    key = read_secret(path)
    return [key, router_key(key)]


def test_nothing_outlives_a_fleet_that_was_killed(smollm2_path: Path, tmp_path: Path) -> None:
    with fleet(tmp_path, smollm2_path, "--workers", "1") as running:
        started = descendants(running.process.pid)
        assert len(started) >= 3
        running.process.kill()
        running.process.wait()
        until(lambda: not any(map(is_alive, started)), 20)


def test_a_worker_that_cannot_start_ends_all_with_its_sentence(smollm2_path: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "up", str(smollm2_path), "--workers", "2", "--port", "0", "--max-context", "99999999"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, env=environment(tmp_path))
    assert done.returncode == 2 and "this model was made for" in done.stderr, done.stderr
