"""`twostroke fleet deploy` on a real Ray of this machine: pools that grow under a burst and shrink again without a
failed request, alone and as the one of two that reads; a child that is killed and replaced, pools that are empty until
somebody asks, and no process left in the end. Skipped where there is no Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray")
pytest.importorskip("smg")

from tests.cluster.routing import descendants, is_alive, until
from twostroke.cluster.fleet import free_port
from twostroke.cluster.keys import FLEET_KEY_VARIABLE, new_fleet_key, router_key
from twostroke.cluster.role import Role
from twostroke.cluster.router_client import RouterClient
from twostroke.cluster.standing_in import stands_in

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


@dataclass
class Deployed:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    client: RouterClient

    def well(self, role: Role = Role.BOTH) -> list[str]:
        """Workers of that pool."""
        found = [one for one in self.client.workers() if one.is_healthy and not one.is_leaving and not stands_in(one)]
        return [one.url for one in found if one.role is role]

    def at_the_door(self) -> set[Role]:
        """Pools whose requests are held; none where anybody else is in the list."""
        found = self.client.workers()
        return {one.role for one in found} if all(map(stands_in, found)) else set()


@contextmanager
def deployed(folder: Path, file: str) -> Iterator[Deployed]:
    port, key, log = free_port(), new_fleet_key(), folder / "log"
    (folder / "fleet.toml").write_text(file.format(port=port))
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), FLEET_KEY_VARIABLE: key}
    with log.open("wb") as output:
        command = [*COMMAND, str(folder / "fleet.toml")]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    started: set[int] = set()
    try:
        until(lambda: "ready: the router is at" in log.read_text() or process.poll() is not None, 180, log.read_text)
        yield Deployed(process, url, log, RouterClient(url, router_key(key)))
        started = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 130
    finally:
        started |= descendants(process.pid) if process.poll() is None else set()
        process.kill()
        process.wait()
        until(lambda: not any(map(is_alive, started)), 60)


def server_of(pids: set[int], url: str) -> int:
    """The process that listens there, by its arguments."""
    port = url.rpartition(":")[2].encode()
    for pid in pids:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"serve" in arguments and port in arguments and not any(b"twostroke.cluster" in one for one in arguments):
            return pid
    raise AssertionError(f"nobody listens at {url}")


def test_a_pool_follows_its_load(smollm2_path: Path, tmp_path: Path) -> None:
    with deployed(tmp_path, FILE) as fleet:
        until(lambda: len(fleet.well()) == 1, 60, fleet.log.read_text)
        with ThreadPoolExecutor(16) as pool:
            statuses = [status for found in pool.map(lambda n: ask_on(fleet.url, n), range(16)) for status in found]
        assert set(statuses) == {200}, statuses
        assert "both: 2 running" in fleet.log.read_text()
        until(lambda: fleet.log.read_text().rstrip().endswith("both: 1 running"), 120, fleet.log.read_text)
        until(lambda: len(fleet.well()) == 1, 60, fleet.log.read_text)
        [before] = fleet.well()
        os.kill(server_of(descendants(fleet.process.pid), before), signal.SIGKILL)
        until(lambda: fleet.well() and before not in fleet.well(), 120, fleet.log.read_text)
        assert ask(fleet.url, "Still there?") == 200
        assert before not in [worker.url for worker in fleet.client.workers() if not worker.is_leaving]


READING_FILE = """
model = "smollm2"
drain_s = 10
options = ["--backend", "cpu", "--max-context", "1024", "--kv-memory", "100MB", "--threads", "1", "--kv-host-gb", "0.1"]
[router]
port = {port}
[pools.prefill]
min = 1
max = 2
cpus = 0.5
options = ["--hand-over", "all"]
[pools.decode]
min = 1
max = 1
cpus = 0.5
[scaling]
start_s = 5
settle_s = 5
hold_s = 25
"""
LIMIT_S = 240.0
"""On a busy machine, for a replica to come or to go."""


def handed_over(url: str, text: str) -> tuple[int, str]:
    """How it was answered, and who read it."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=180)
    return answer.status_code, answer.json()["timing"]["handoff"]["read_by"] if answer.status_code == 200 else ""


def test_the_pool_that_reads_grows_with_its_prompts_and_shrinks_while_others_ask(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """Long prompts come until two workers read, and have read. Then somebody asks now and then, until one has gone."""
    with deployed(tmp_path, READING_FILE) as fleet, ThreadPoolExecutor(13) as pool:
        said = fleet.log.read_text
        until(lambda: all(len(fleet.well(role)) == 1 for role in (Role.PREFILL, Role.DECODE)), 120, said)
        readers, is_over = set[str](), threading.Event()

        def ask_until_over(number: int, times: int, pause_s: float) -> set[int]:
            found, count = set[int](), 0
            while not is_over.is_set():
                status, reader = handed_over(fleet.url, f"{number} {count} " + "tell me of the sea. " * times)
                found, count = found | {status}, count + 1
                readers.add(reader)
                is_over.wait(pause_s)
            return found

        asking = [pool.submit(ask_until_over, number, 80, 0.0) for number in range(12)]
        try:
            until(lambda: len(fleet.well(Role.PREFILL)) == 2 and len(readers - {""}) >= 2, LIMIT_S, said)
        finally:
            is_over.set()
        assert {status for one in asking for status in one.result()} == {200}, said()
        assert "decode: 1 running; prefill: 2 running" in said()
        is_over.clear()
        now_and_then = pool.submit(ask_until_over, 12, 1, 1.0)
        try:
            until(lambda: said().rstrip().endswith("prefill: 1 running"), LIMIT_S, said)
            until(lambda: len(fleet.well(Role.PREFILL)) == 1, 60, said)
        finally:
            is_over.set()
        assert now_and_then.result() == {200}, said()
        assert len(fleet.well(Role.DECODE)) == 1


EMPTY_FILE = """
model = "smollm2"
drain_s = 10
options = ["--backend", "cpu", "--max-context", "1024", "--kv-memory", "100MB", "--threads", "1"]
[router]
port = {port}
{pools}
[scaling]
start_s = 5
settle_s = 5
hold_s = 10
idle_s = 15
"""
POOL = """[pools.{role}]
min = 0
max = 1
cpus = 0.5
"""


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)], ids=["plain", "two pools"])
def test_pools_without_work_are_empty_until_somebody_asks(
    smollm2_path: Path, tmp_path: Path, roles: tuple[Role, ...]
) -> None:
    """Three at once: each is answered, whole, when replicas are there; nobody is told to come again."""
    pools = "".join(POOL.format(role=role.value) for role in roles)
    with deployed(tmp_path, EMPTY_FILE.format(port="{port}", pools=pools)) as fleet:
        said = fleet.log.read_text
        for _ in range(2):
            until(lambda: all(len(fleet.well(role)) == 1 for role in roles), 120, said)
            assert ask(fleet.url, "Somebody is here.") == 200
            until(lambda: not any(fleet.well(role) for role in roles), 180, said)
            until(lambda: fleet.at_the_door() == set(roles), 60, said)
            with ThreadPoolExecutor(3) as asking:
                asked = [asking.submit(ask, fleet.url, f"{number}: is anybody there?") for number in range(3)]
                assert [one.result(180) for one in asked] == [200, 200, 200], said()
