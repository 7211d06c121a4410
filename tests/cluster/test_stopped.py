"""A whole worker behind smg stands still: its server takes connections and answers nothing, its engine does nothing. No
process has ended, so nobody but whoever asks it how it is can tell. Others serve soon, and no stream hangs for long."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.endings import (
    AGAIN_S,
    ERROR,
    REFUSED,
    WHOLE,
    drawn_body,
    ending,
    expected_text,
    is_idle,
    metric,
    num_running,
)
from tests.cluster.fleets import OPTIONS as ALONE_OPTIONS
from tests.cluster.routing import descendants, is_alive, until
from tests.cluster.test_fleet_up import Running, fleet, keys_of
from tests.cluster.test_pools import POOLS, named, workers
from tests.server.running import RunningServer, running_server
from twostroke.cluster.fleet import END_AFTER_S, OUT_AFTER_S
from twostroke.cluster.router_client import RouterClient
from twostroke.kv.tiers.peers import LEASE_S

pytest.importorskip("smg")
pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
NUM_STREAMS, NUM_LATER = 6, 4
MAX_TOKENS = 300
READ_WORDS = 500
"""Of a prompt that is in flight: a quick machine reads it for long enough to be caught at it."""
ENDED_S = END_AFTER_S + 5.0
"""Within which whoever waits for a worker that stands still is told something: an error, or what another writes."""


@dataclass
class Asked:
    body: dict[str, Any]
    expected: str
    heard: list[Any] = field(default_factory=list)
    ended_s: float | None = None


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("alone") / "log", *ALONE_OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def streams(alone: RunningServer) -> list[tuple[dict[str, Any], str]]:
    """Those in flight, whose answers take their time, and those who come later."""
    bodies = [drawn_body(100 + number, READ_WORDS, MAX_TOKENS) for number in range(NUM_STREAMS)]
    bodies += [drawn_body(200 + number, 100, 8) for number in range(2 * NUM_LATER)]
    return [(body, expected_text(alone, body)) for body in bodies]


@contextmanager
def stopped(pid: int) -> Iterator[set[int]]:
    """A server and its engine stand still."""
    pids = {pid} | descendants(pid)
    for one in pids:
        os.kill(one, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for one in pids:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)


def asked_of(running: Running, streams: list[tuple[dict[str, Any], str]]) -> list[Asked]:
    return [Asked(named(body, running), expected) for body, expected in streams]


def ask(running: Running, one: Asked) -> str:
    how = ending(running.url, one.body, one.expected, one.heard)
    one.ended_s = time.monotonic()
    return how


def begun(running: Running, pool: ThreadPoolExecutor, asked: list[Asked], role: str) -> list[Future[str]]:
    """Until some of it runs at whoever is to be stopped: with writers, until each client has been told something."""
    asking = [pool.submit(ask, running, one) for one in asked]
    if role == "decode":
        until(lambda: all(len(one.heard) >= 3 for one in asked), said=running.said)
    until(lambda: busiest(running, role) is not None, said=running.said)
    return asking


def busiest(running: Running, role: str) -> tuple[str, int] | None:
    found = max(workers(running, role), key=lambda one: num_running(one[0]))
    return found if num_running(found[0]) else None


def sent_requests(running: Running) -> set[str]:
    """Whom the router takes for well."""
    found = RouterClient(running.url, keys_of(running)[1]).workers()
    return {one.url.rstrip("/") for one in found if one.is_healthy and not one.is_leaving}


def all_idle(running: Running) -> None:
    """And no block is leased any longer, whatever was kept for whoever stood still."""
    for url, _ in (*workers(running, "prefill"), *workers(running, "decode")):
        until(lambda url=url: is_idle(url), LEASE_S + 30.0, running.said)  # type: ignore[misc]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_worker_that_stands_still_is_gone_round_and_replaced(
    smollm2_path: Path, tmp_path: Path, streams: list[tuple[dict[str, Any], str]], role: str
) -> None:
    """For longer than a lease, if it were left alone."""
    with fleet(tmp_path, smollm2_path, *POOLS) as running, ThreadPoolExecutor(2 * NUM_STREAMS) as pool:
        asked = asked_of(running, streams)
        in_flight, later = asked[:NUM_STREAMS], asked[NUM_STREAMS:]
        assert ask(running, later.pop()) == WHOLE
        asking = begun(running, pool, in_flight, role)
        url, pid = busiest(running, role) or workers(running, role)[0]
        with stopped(pid) as pids:
            stopped_s = time.monotonic()
            early = [later.pop() for _ in range(2)]
            asking += [pool.submit(ask, running, one) for one in early]
            time.sleep(max(0.0, stopped_s + AGAIN_S - time.monotonic()))
            for _ in range(NUM_LATER):
                began_s = time.monotonic()
                assert ask(running, later.pop()) == WHOLE, running.said()
                assert time.monotonic() - began_s < AGAIN_S, "nobody waits for it any longer"
                assert is_alive(pid), "it has not been replaced: others serve"
            left_s = stopped_s + ENDED_S - time.monotonic()
            until(lambda: all(one.heard for one in (*in_flight, *early)), left_s, running.said)
            until(lambda: not any(map(is_alive, pids)), said=running.said)
        endings = [one.result() for one in asking]
        broken_s = [one.ended_s - stopped_s for one, how in zip(in_flight, endings, strict=False) if how == ERROR]  # type: ignore[operator]
        print(f"{role} stopped: {endings}; those with an error ended after {broken_s} s")
        assert len(broken_s) > 0 if role == "decode" else set(endings) == {WHOLE}
        assert set(endings) <= {WHOLE, ERROR} and endings[NUM_STREAMS:] == [WHOLE, WHOLE]
        assert all(ended_s < ENDED_S for ended_s in broken_s)
        assert f"{role}-" in running.said() and "does not answer, and is killed if that lasts" in running.said()
        all_idle(running)
        until(lambda: url in sent_requests(running), said=running.status)
        before = metric(url, "twostroke_prompt_tokens_total")
        again = [Asked(one.body, one.expected) for one in in_flight]
        assert [one.result() for one in [pool.submit(ask, running, one) for one in again]] == [WHOLE] * NUM_STREAMS
        assert metric(url, "twostroke_prompt_tokens_total") > before, "who was replaced serves again"


def test_a_worker_that_stands_still_for_a_moment_goes_on(
    smollm2_path: Path, tmp_path: Path, streams: list[tuple[dict[str, Any], str]]
) -> None:
    """It is taken out of the router, and comes back; its streams are whole."""
    with fleet(tmp_path, smollm2_path, *POOLS) as running, ThreadPoolExecutor(NUM_STREAMS) as pool:
        asked = asked_of(running, streams)
        asking = begun(running, pool, asked[:NUM_STREAMS], "decode")
        url, pid = busiest(running, "decode") or workers(running, "decode")[0]
        with stopped(pid):
            until(lambda: "does not answer" in running.said(), OUT_AFTER_S + 5.0)
            until(lambda: url not in sent_requests(running), 5.0)
            assert ask(running, asked[-1]) == WHOLE
        assert [one.result() for one in asking] == [WHOLE] * NUM_STREAMS
        until(lambda: "answers again" in running.said())
        until(lambda: url in sent_requests(running), said=running.status)
        assert is_alive(pid) and "killed" not in running.said().replace("killed if that lasts", "")
        all_idle(running)


FULL = ("--kv-memory", "24MB", "--serve", "--max-queue 1")
"""KV for one or two answers, and a queue for one."""
NUM_FULL = 10


def test_a_full_pool_refuses_and_loses_nothing(smollm2_path: Path, tmp_path: Path, alone: RunningServer) -> None:
    """Prompts are read, and nobody has room to write: a client is answered, or told at once to come again. What was
    kept for those who were refused is free when its time is over."""
    bodies = [drawn_body(300 + number, 300, 100) for number in range(NUM_FULL)]
    expected = [expected_text(alone, body) for body in bodies]
    with fleet(tmp_path, smollm2_path, *POOLS, *FULL) as running:
        asked = [Asked(named(body, running), text) for body, text in zip(bodies, expected, strict=True)]

        def until_whole(one: Asked) -> list[str]:
            endings: list[str] = []
            until_s = time.monotonic() + 300.0
            while WHOLE not in endings and time.monotonic() < until_s:
                one.heard.clear()
                endings.append(ask(running, one))
                assert endings[-1] == WHOLE or "the queue is full" in one.heard[0]
                time.sleep(0.5)
            return endings

        with ThreadPoolExecutor(NUM_FULL) as pool:
            endings = list(pool.map(until_whole, asked))
        print(f"a full pool: {[len(one) - 1 for one in endings]} refused before each was whole")
        assert all(set(one[:-1]) <= {REFUSED} and one[-1] == WHOLE for one in endings), endings
        assert sum(map(len, endings)) > NUM_FULL, "it was full"
        all_idle(running)
        began_s = time.monotonic()
        assert until_whole(Asked(asked[0].body, asked[0].expected)) == [WHOLE]
        assert time.monotonic() - began_s < AGAIN_S
