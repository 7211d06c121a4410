"""Prompts read in one pool and answered in the other, behind the routers that people use: what clients are told is what
one server alone tells them, whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.fleets import OPTIONS as ALONE_OPTIONS
from tests.cluster.fleets import TEXTS, WORDS, body_of, drawn_request, told
from tests.cluster.routing import until
from tests.cluster.test_fleet_up import Running, fleet
from tests.server.running import CLIENT, RunningServer, running_server

pytest.importorskip("smg")
pytestmark = pytest.mark.fleet
NUM_REQUESTS = int(os.environ.get("FLEET_REQUESTS", "200"))
POOLS = ("--prefill", "1", "--decode", "2", "--kv-host-gb", "0.3", "--threads", "1")
AGAIN_S = 5.0
"""Within which a fleet serves again."""


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("alone") / "log", *ALONE_OPTIONS) as running:
        yield running


def requests(number: int, seed: int = 5) -> list[tuple[str, dict[str, Any]]]:
    drawn = random.Random(seed)
    return [drawn_request(place, drawn.choices(WORDS, k=drawn.randint(5, 160)), place) for place in range(number)]


def named(body: dict[str, Any], running: Running) -> dict[str, Any]:
    return {**body, "model": running.client().models.list().data[0].id}


def workers(running: Running, role: str) -> list[tuple[str, int]]:
    """Addresses and process ids, of the table that was printed."""
    found = re.findall(rf"^{role}\S* +(http://\S+) +(\d+)", running.said(), re.MULTILINE)
    return [(url, int(pid)) for url, pid in found]


def metric(url: str, name: str) -> float:
    lines = CLIENT.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[{{ ]", line))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("router", ["smg", "vllm-router"])
def test_clients_are_told_what_one_server_alone_tells_them(
    smollm2_path: Path, tmp_path: Path, alone: RunningServer, router: str
) -> None:
    with fleet(tmp_path, smollm2_path, *POOLS, "--router", router) as running:
        model = running.client().models.list().data[0].id
        asked = requests(NUM_REQUESTS)

        def ask(one: tuple[str, dict[str, Any]]) -> tuple[Any, Any]:
            path, body = one
            through = CLIENT.post(f"{running.url}{path}", json={**body, "model": model}, timeout=300)
            return told(through), told(alone.post(path, body))

        with ThreadPoolExecutor(3) as pool:
            for (path, body), (through, expected) in zip(asked, pool.map(ask, asked), strict=True):
                assert _unnamed(through) == _unnamed(expected), (path, body)
        readers, writers = workers(running, "prefill"), workers(running, "decode")
        for path in TEXTS:
            if router == "smg" and path.startswith("/api"):
                continue  # it knows no such route
            answer = CLIENT.post(f"{running.url}{path}", json={**body_of(path), "model": model}, timeout=300).json()
            assert TEXTS[path](answer) == TEXTS[path](alone.post(path, body_of(path)).json()), path
            assert answer["timing"]["handoff"]["why_not"] is None, path
        granted = metric(readers[0][0], 'twostroke_handoffs_total{outcome="granted"}'.replace("{", r"\{"))
        fetched = [metric(url, "twostroke_handoff_fetched_tokens_total") for url, _ in writers]
        assert granted > NUM_REQUESTS / 3 and min(fetched) > 0
        until(lambda: metric(readers[0][0], "twostroke_kv_leases") == 0, 40)


def _unnamed(given: Any) -> Any:
    """The model's name is what each server was started with."""
    if isinstance(given, dict):
        return {name: _unnamed(value) for name, value in given.items() if name != "model"}
    return [_unnamed(one) for one in given] if isinstance(given, list) else given


@pytest.mark.timeout(900)
def test_whoever_dies_the_fleet_serves_again(smollm2_path: Path, tmp_path: Path, alone: RunningServer) -> None:
    """A stream is whole, or ends with an error; nobody is told a wrong token; soon all are served again."""
    with fleet(tmp_path, smollm2_path, *POOLS) as running:
        model = running.client().models.list().data[0].id
        body = {"prompt": " ".join(WORDS[:150]), "max_tokens": 24, "temperature": 0.0, "stream": True}
        expected = "".join(
            choice["text"] for event in told(alone.post("/v1/completions", body)) for choice in event["choices"]
        )
        stopped = threading.Event()
        broken: list[str] = []

        def stream() -> str:
            asked = {**body, "model": model}
            with CLIENT.stream("POST", f"{running.url}/v1/completions", json=asked) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            events = [json.loads(line) for line in lines if line.startswith("{")]
            text = "".join(choice["text"] for event in events for choice in event.get("choices", []))
            assert expected.startswith(text), (text, expected)
            is_whole = lines[-1:] == ["[DONE]"] and text == expected
            return "whole" if is_whole else "broken"

        def keep_asking() -> None:
            while not stopped.is_set():
                try:
                    broken.append(stream())
                except httpx.HTTPError as error:
                    broken.append(type(error).__name__)
                time.sleep(0.05)

        assert stream() == "whole"
        for role, number in (("prefill", signal.SIGKILL), ("decode", signal.SIGKILL), ("router", signal.SIGKILL)):
            pid = running.pids(role)[-1]
            stopped.clear()
            asker = threading.Thread(target=keep_asking)
            asker.start()
            time.sleep(1.0)
            os.kill(pid, number)
            time.sleep(1.0)
            began_s = time.monotonic()
            until(lambda: _is_whole(stream), 60, running.said)
            print(role, "killed: served again after", round(time.monotonic() - began_s, 1), "s", broken[-8:])
            stopped.set()
            asker.join()
        for url, _ in (*workers(running, "prefill"), *workers(running, "decode")):
            until(lambda url=url: _idle(url), 60)  # type: ignore[misc]


def _is_whole(stream: Any) -> bool:
    try:
        return bool(stream() == "whole")
    except httpx.HTTPError:
        return False


def _idle(url: str) -> bool:
    try:
        return metric(url, "twostroke_running") == 0 and metric(url, "twostroke_kv_leases") == 0
    except httpx.HTTPError:
        return False  # it is being started again
