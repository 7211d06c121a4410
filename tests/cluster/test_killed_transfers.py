"""Real servers that are killed between reading and writing, and while KV goes from one to the other, which a slow link
holds up in its midst."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.fleets import KEY, read, servers, told, write
from tests.cluster.slow_link import over_slow_link
from tests.cluster.test_fleet import prompt_of
from tests.cluster.test_fleet_trouble import second, serves_still
from tests.cluster.transfers import needs_nixl
from tests.server.running import RunningServer

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
PATH = "/v1/completions"
NUM_WORDS = 700
"""Some 20 MB of KV: more than the buffers of a system hold for whoever was killed."""
HELD_AFTER = 1_000_000
HELD_S = 120.0
LENT_AFTER = 400
"""More than a greeting, and less than what says how a peer is reached by NIXL, which comes next."""
READING_S = 1.0


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with servers(tmp_path_factory.mktemp("alone"), "alone") as (server,):
        yield server


def kill(server: RunningServer) -> None:
    """All of it, at once."""
    for pid in (server.engine_pid(), server.process.pid):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


def token_ids(server: RunningServer, prompt: str) -> list[int]:
    answer = server.post("/tokenize", {"model": "smollm2", "prompt": prompt})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


def test_a_reader_that_is_killed_after_reading_costs_no_token(alone: RunningServer, tmp_path: Path) -> None:
    """Its server too, so that nobody is at its address."""
    with servers(second(tmp_path), "decode") as (writer,):
        body = prompt_of(64, NUM_WORDS)
        with servers(tmp_path, "prefill") as (reader,):
            params = read(reader, PATH, body)
            assert reader.metric("twostroke_kv_leases") == 1
            kill(reader)
            costs_no_token(writer, alone, write(writer, PATH, body, params), body)
        with servers(tmp_path, "prefill") as (successor,):
            serves_still(successor, writer, alone, 65)


def costs_no_token(writer: RunningServer, alone: RunningServer, answer: httpx.Response, body: dict[str, Any]) -> None:
    """What came of the KV is not used: the prompt is read where it is written, and no block is held."""
    assert told(answer) == told(alone.post(PATH, body))
    handoff = answer.json()["timing"]["handoff"]
    assert handoff["why_not"] and not handoff["tokens"]
    assert writer.metric("twostroke_handoffs_total", outcome="failed") == 1
    writer.wait_until_idle()


def test_a_reader_that_is_killed_while_its_kv_is_taken_costs_no_token(alone: RunningServer, tmp_path: Path) -> None:
    with servers(second(tmp_path), "decode") as (writer,):
        body = prompt_of(60, NUM_WORDS)
        with servers(tmp_path, "prefill") as (reader,), ThreadPoolExecutor(1) as pool:
            params, ids = read(reader, PATH, body), token_ids(alone, body["prompt"])
            with over_slow_link(sha256(KEY.encode()).digest(), params, ids, HELD_AFTER) as (link, slow):
                writing = pool.submit(write, writer, PATH, body, slow)
                assert link.is_held.wait(HELD_S), "bytes are on their way"
                kill(reader)
                link.let_go()
                answer = writing.result()
        costs_no_token(writer, alone, answer, body)
        with servers(tmp_path, "prefill") as (successor,):
            serves_still(successor, writer, alone, 61)


@needs_nixl
def test_a_reader_that_is_killed_while_nixl_reads_from_it_costs_no_token(
    alone: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIXL goes by TCP, as between hosts. The reader stands still once it has lent its KV: NIXL moves nothing while an
    owner does not look, so the read has begun and cannot end."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with servers(second(tmp_path), "decode", transfer="nixl") as (writer,):
        body = prompt_of(66, NUM_WORDS)
        with servers(tmp_path, "prefill", transfer="nixl") as (reader,), ThreadPoolExecutor(1) as pool:
            params, ids = read(reader, PATH, body), token_ids(alone, body["prompt"])
            with over_slow_link(sha256(KEY.encode()).digest(), params, ids, LENT_AFTER) as (link, slow):
                writing = pool.submit(write, writer, PATH, body, slow)
                assert link.is_held.wait(HELD_S), "it has lent its KV"
                for pid in (reader.engine_pid(), reader.process.pid):
                    os.kill(pid, signal.SIGSTOP)
                link.let_go()
                time.sleep(READING_S)
                assert not writing.done()
                kill(reader)
                answer = writing.result()
        costs_no_token(writer, alone, answer, body)
        with servers(tmp_path, "prefill", transfer="nixl") as (successor,):
            serves_still(successor, writer, alone, 67)


def test_a_writer_that_is_killed_while_it_takes_kv_leaves_no_lease(alone: RunningServer, tmp_path: Path) -> None:
    with servers(tmp_path, "prefill") as (reader,):
        body = prompt_of(62, NUM_WORDS)
        with servers(second(tmp_path), "decode") as (writer,), ThreadPoolExecutor(1) as pool:
            params, ids = read(reader, PATH, body), token_ids(alone, body["prompt"])
            with over_slow_link(sha256(KEY.encode()).digest(), params, ids, HELD_AFTER) as (link, slow):
                writing = pool.submit(write, writer, PATH, body, slow)
                assert link.is_held.wait(HELD_S), "bytes are on their way"
                kill(writer)
                link.let_go()
                assert writing.exception() is not None, "whoever asked is told that nobody answers"
        reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)
        reader.wait_until_idle()
        with servers(tmp_path / "second", "decode") as (successor,):
            serves_still(reader, successor, alone, 63)
