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
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.fleets import OPTIONS as ALONE_OPTIONS
from tests.cluster.fleets import TEXTS, WORDS, body_of, drawn_request, told
from tests.cluster.routing import is_alive, until
from tests.cluster.test_fleet_up import Running, fleet
from tests.server.running import CLIENT, RunningServer, running_server

pytest.importorskip("smg")
pytestmark = pytest.mark.fleet
NUM_REQUESTS = int(os.environ.get("FLEET_REQUESTS", "200"))
POOLS = ("--prefill", "1", "--decode", "2", "--kv-host-gb", "0.3", "--threads", "1")
AGAIN_S = 5.0
"""Within which a fleet serves again, from the moment that one of its processes was killed."""
NUM_ASKERS = 3
WHOLE, REFUSED, ERROR, CUT = "whole", "refused", "ended with an error", "cut off"
"""How a stream ends: refused before its first event; cut off: the connection broke, which only a dead router does."""


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

        def ask(one: tuple[str, dict[str, Any]], leaves_after: int | None) -> tuple[Any, Any]:
            path, body = one
            if leaves_after is not None:
                _leave(f"{running.url}{path}", {**body, "model": model}, leaves_after)
            through = CLIENT.post(f"{running.url}{path}", json={**body, "model": model}, timeout=300)
            return told(through), told(alone.post(path, body))

        lefts = [None if place % 9 else place % 4 for place in range(len(asked))]
        with ThreadPoolExecutor(3) as pool:
            for (path, body), (through, expected) in zip(asked, pool.map(ask, asked, lefts), strict=True):
                assert _unnamed(through) == _unnamed(expected), (path, body)
        readers, writers = workers(running, "prefill"), workers(running, "decode")
        for path in TEXTS:
            if router == "smg" and path.startswith("/api"):
                continue  # it knows no such route
            answer = CLIENT.post(f"{running.url}{path}", json={**body_of(path), "model": model}, timeout=300).json()
            assert TEXTS[path](answer) == TEXTS[path](alone.post(path, body_of(path)).json()), path
            assert answer["timing"]["handoff"]["why_not"] is None, path
            assert answer["timing"]["handoff"]["first_token"], path
        granted = metric(readers[0][0], 'twostroke_handoffs_total{outcome="granted"}'.replace("{", r"\{"))
        fetched = [metric(url, "twostroke_handoff_fetched_tokens_total") for url, _ in writers]
        assert granted > NUM_REQUESTS / 3 and min(fetched) > 0
        for url, _ in (*readers, *writers):
            until(lambda url=url: _idle(url), 40)  # type: ignore[misc]
        num_gone = sum(metric(url, "twostroke_client_disconnects_total") for url, _ in writers)
        assert num_gone == len(lefts) - lefts.count(None), "each who left was noticed"


def _leave(url: str, body: dict[str, Any], num_events: int) -> None:
    """A client who asks for a long answer, and goes after so many events of it."""
    kept = {name: body[name] for name in ("model", "prompt", "messages") if name in body}
    asked = {**kept, "stream": True, "max_tokens": 400, "ignore_eos": True}
    with CLIENT.stream("POST", url, json=asked, timeout=300) as answer:
        assert answer.status_code == 200, answer.read()
        events = (line for line in answer.iter_lines() if line)
        told_of = [line for line, _ in zip(events, range(num_events), strict=False)]
    assert len(told_of) == num_events and "data: [DONE]" not in told_of


def _unnamed(given: Any) -> Any:
    """The model's name is what each server was started with."""
    if isinstance(given, dict):
        return {name: _unnamed(value) for name, value in given.items() if name != "model"}
    return [_unnamed(one) for one in given] if isinstance(given, list) else given


@pytest.mark.timeout(900)
def test_whoever_dies_the_fleet_serves_again(smollm2_path: Path, tmp_path: Path, alone: RunningServer) -> None:
    """A stream is whole, or ends with an error; nobody is told a wrong token; soon all are served again."""
    with fleet(tmp_path, smollm2_path, *POOLS) as running:
        body = {"prompt": " ".join(WORDS[:150]), "max_tokens": 24, "temperature": 0.0, "stream": True}
        expected = _text(told(alone.post("/v1/completions", body)))
        asked = named(body, running)

        def stream() -> str:
            return _ending(running.url, asked, expected)

        assert stream() == WHOLE
        for role in ("prefill", "decode", "router"):
            pid = running.pids(role)[-1]
            with _asking(stream, NUM_ASKERS) as endings:
                time.sleep(1.0)
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
                until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
                until(lambda: stream() == WHOLE, 60, running.said)
                again_s = time.monotonic() - killed_s
            counts = Counter(endings)
            print(f"{role} killed: served again after {again_s:.1f} s, {dict(counts)}")
            assert again_s <= AGAIN_S, (role, again_s, running.said())
            assert set(counts) <= ({WHOLE, REFUSED, ERROR, CUT} if role == "router" else {WHOLE, REFUSED, ERROR})
        for url, _ in (*workers(running, "prefill"), *workers(running, "decode")):
            until(lambda url=url: _idle(url), 60)  # type: ignore[misc]


@contextmanager
def _asking(stream: Callable[[], str], number: int) -> Iterator[list[str]]:
    """So many clients who ask again and again, and how each of their streams ended."""
    stopped = threading.Event()
    endings: list[str] = []

    def keep_asking() -> None:
        while not stopped.is_set():
            endings.append(stream())
            time.sleep(0.05)

    with ThreadPoolExecutor(number) as pool:
        askers = [pool.submit(keep_asking) for _ in range(number)]
        try:
            yield endings
        finally:
            stopped.set()
        for asker in askers:
            asker.result()


def _ending(url: str, body: dict[str, Any], expected: str) -> str:
    """How a stream ended, of which no token was wrong. One that just ends is a failure: its client cannot tell."""
    lines: list[str] = []
    ending = ""
    try:
        with CLIENT.stream("POST", f"{url}/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                lines += [line.removeprefix("data: ")] if line else []
        if answer.status_code >= 400:
            return REFUSED
    except httpx.HTTPError:
        ending = CUT
    events = [json.loads(line) for line in lines if line.startswith("{")]
    text = _text(events)
    assert expected.startswith(text), (text, expected)
    if events and "error" in events[-1]:
        return ERROR
    assert ending or (lines[-1:] == ["[DONE]"] and text == expected), lines
    return ending or WHOLE


def _text(events: list[Any]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


def _idle(url: str) -> bool:
    try:
        return all(
            metric(url, f"twostroke_{name}") == 0 for name in ("running", "waiting", "kv_occupancy", "kv_leases")
        )
    except httpx.HTTPError:
        return False  # it is being started again
