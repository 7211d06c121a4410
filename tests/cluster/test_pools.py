"""Prompts read in one pool and answered in the other, behind the routers that people use: what clients are told is what
one server alone tells them, whoever dies meanwhile."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.endings import (
    AGAIN_S,
    CUT,
    ERROR,
    REFUSED,
    WHOLE,
    asking,
    drawn_body,
    ending,
    expected_text,
    is_idle,
    metric,
    num_running,
)
from tests.cluster.fleets import OPTIONS as ALONE_OPTIONS
from tests.cluster.fleets import TEXTS, WORDS, body_of, drawn_request, told
from tests.cluster.routing import is_alive, until
from tests.cluster.test_fleet_up import Running, fleet
from tests.server.running import CLIENT, RunningServer, running_server

pytest.importorskip("smg")
pytestmark = pytest.mark.fleet
NUM_REQUESTS = int(os.environ.get("FLEET_REQUESTS", "200"))
POOLS = ("--prefill", "1", "--decode", "2", "--kv-host-gb", "0.3", "--threads", "1")
NUM_ASKERS = 3
NUM_WORDS, MAX_TOKENS = 400, 24
"""Of those who ask while somebody dies. Some 700 tokens are long enough to be read when their reader is killed."""
NUM_PROMPTS = 12
"""For each that is killed. Nobody asks the same twice before somebody is killed, else the reader has it cached."""


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
        granted = metric(readers[0][0], "twostroke_handoffs_total", outcome="granted")
        fetched = [metric(url, "twostroke_handoff_fetched_tokens_total") for url, _ in writers]
        assert granted > NUM_REQUESTS / 3 and min(fetched) > 0
        for url, _ in (*readers, *writers):
            until(lambda url=url: is_idle(url), 40)  # type: ignore[misc]
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
    """A stream is whole, or ends with an error; nobody is told a wrong token; soon all are served again. Every prompt
    is new until somebody is killed, which is when a request runs there: the reader dies while it reads."""
    roles = ("prefill", "decode", "router")
    bodies = [drawn_body(number, NUM_WORDS, MAX_TOKENS) for number in range(NUM_PROMPTS * len(roles) + 1)]
    expected = [expected_text(alone, body) for body in bodies]
    with fleet(tmp_path, smollm2_path, *POOLS) as running:
        asked = [named(body, running) for body in bodies]

        def stream(place: int = -1) -> str:
            return ending(running.url, asked[place], expected[place])

        assert stream() == WHOLE
        for number, role in enumerate(roles):
            places = itertools.cycle(range(number * NUM_PROMPTS, (number + 1) * NUM_PROMPTS))
            [(reader, _)] = workers(running, "prefill")
            granted_before = granted(reader)
            with asking(lambda places=places: stream(next(places)), NUM_ASKERS) as endings:  # type: ignore[misc]
                until(lambda before=granted_before, url=reader: granted(url) > before)  # type: ignore[misc]
                url, pid = busiest(running, role)
                os.kill(pid, signal.SIGKILL)
                killed_s = time.monotonic()
                assert len(endings) < NUM_PROMPTS - NUM_ASKERS, "all that was asked by then was new"
                until(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
                until(lambda: stream() == WHOLE, 60, running.said)
                again_s = time.monotonic() - killed_s
            counts = Counter(endings)
            print(f"{role} killed: served again after {again_s:.1f} s, {dict(counts)}")
            assert again_s <= AGAIN_S, (role, again_s, running.said())
            assert set(counts) <= ({WHOLE, REFUSED, ERROR, CUT} if role == "router" else {WHOLE, REFUSED, ERROR})
            for url, _ in (*workers(running, "prefill"), *workers(running, "decode")):
                until(lambda url=url: is_idle(url), 60)  # type: ignore[misc]
            if role == "prefill":
                until(lambda url=reader: reads_again(running, url, alone), 60, running.said)  # type: ignore[misc]


def granted(reader: str) -> float:
    return metric(reader, "twostroke_handoffs_total", outcome="granted")


def busiest(running: Running, role: str) -> tuple[str, int]:
    """Whom a request runs at, at this moment; the router, when one runs anywhere."""
    until_s = time.monotonic() + 60.0
    while time.monotonic() < until_s:
        for url, pid in workers(running, r"(?:prefill|decode)" if role == "router" else role):
            if num_running(url) > 0:
                return (url, pid) if role != "router" else (running.url, running.pids(role)[-1])
    raise AssertionError(f"nothing runs at {role}")


def reads_again(running: Running, reader: str, alone: RunningServer) -> bool:
    """A prompt that is new is handed over."""
    body = drawn_body(time.monotonic_ns(), NUM_WORDS, MAX_TOKENS)
    before = granted(reader)
    return ending(running.url, named(body, running), expected_text(alone, body)) == WHOLE and granted(reader) > before
