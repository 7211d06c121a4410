"""Trouble between the two legs of a request that a router would not see: a writer that stands still for longer than a
lease, one without room, and one that keeps another model, or blocks of another size."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.cluster.fleets import KEY, read, servers, told, write
from tests.cluster.test_fleet import prompt_of
from tests.server.running import RunningServer, running_server
from tests.server.scripted_model import make_scripted
from twostroke.cluster.tickets import SKEW_S
from twostroke.kv.tiers.peers import LEASE_S

pytestmark = pytest.mark.fleet
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def alone(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with servers(tmp_path_factory.mktemp("alone"), "alone") as (server,):
        yield server


def second(folder: Path) -> Path:
    """For the logs of a server with options of its own."""
    (folder / "second").mkdir()
    return folder / "second"


def serves_still(reader: RunningServer, writer: RunningServer, alone: RunningServer, seed: int) -> None:
    body = prompt_of(seed)
    answer = write(writer, PATH, body, read(reader, PATH, body))
    assert told(answer) == told(alone.post(PATH, body)) and answer.json()["timing"]["handoff"]["why_not"] is None
    reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)
    for server in (reader, writer):
        server.wait_until_idle()


def test_a_writer_that_stood_still_for_longer_than_its_lease_reads_the_prompt(
    alone: RunningServer, tmp_path: Path
) -> None:
    """The reader's blocks are free when the lease is over, whoever stands still; no token is lost for it. What nobody
    came with in time is refused. They have not met before, so nothing is sent while a prompt is read."""
    with servers(tmp_path, "prefill", "decode", options=("--engine-timeout", "inf")) as (reader, writer):
        body = prompt_of(21)
        params, late = read(reader, PATH, body), read(reader, PATH, prompt_of(23))
        engine, began_s = writer.engine_pid(), time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(1) as pool:
                writing = pool.submit(write, writer, PATH, body, params)
                reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 2)
                reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)
                freed_s = time.monotonic() - began_s
                os.kill(engine, signal.SIGCONT)
                answer = writing.result()
        finally:
            os.kill(engine, signal.SIGCONT)
        assert LEASE_S - 5.0 < freed_s < LEASE_S + 15.0
        assert told(answer) == told(alone.post(PATH, body))
        assert answer.json()["timing"]["handoff"]["why_not"]
        serves_still(reader, writer, alone, 22)
        time.sleep(max(0.0, began_s + LEASE_S + SKEW_S + 1.0 - time.monotonic()))
        answer = write(writer, PATH, prompt_of(23), late)
        assert told(answer) == told(alone.post(PATH, prompt_of(23)))
        handoff = answer.json()["timing"]["handoff"]
        assert handoff["why_not"].startswith("it came too late: its KV was kept until ") and not handoff["tokens"]
        assert answer.json()["timing"]["ttft_s"] > handoff["read_s"] + LEASE_S and handoff["read_s"] > 0.0
        used = write(writer, PATH, prompt_of(23), late)
        assert used.status_code == 400 and "was used before" in used.text


def test_a_full_writer_has_requests_wait_and_refuses_none_for_good(alone: RunningServer, tmp_path: Path) -> None:
    """KV for two prompts, and a queue for two: who finds it full is told so, and comes again with what it has."""
    bodies = [{**prompt_of(seed, 350), "max_tokens": 24} for seed in range(30, 38)]
    limits = ("--max-context", "1024", "--kv-memory", "28MB", "--max-queue", "2")
    with servers(tmp_path, "prefill") as (reader,), servers(second(tmp_path), "decode", options=limits) as (writer,):
        params = [read(reader, PATH, body) for body in bodies]
        num_refused = 0

        def ask(place: int) -> object:
            nonlocal num_refused
            until_s = time.monotonic() + 120.0
            while (answer := write(writer, PATH, bodies[place], params[place])).status_code == 429:
                num_refused += 1
                assert time.monotonic() < until_s
                time.sleep(0.2)
            return told(answer)

        with ThreadPoolExecutor(len(bodies)) as pool:
            answers = list(pool.map(ask, range(len(bodies))))
        assert num_refused
        assert answers == [told(alone.post(PATH, body)) for body in bodies]
        serves_still(reader, writer, alone, 38)
        assert writer.metric("twostroke_handoffs_total", outcome="failed") == 0


def test_blocks_of_another_size_are_taken(alone: RunningServer, tmp_path: Path) -> None:
    with (
        servers(tmp_path, "prefill", options=("--block-size", "32")) as (reader,),
        servers(second(tmp_path), "decode") as (writer,),
    ):
        serves_still(reader, writer, alone, 40)


def test_kv_of_another_model_is_refused_and_the_prompt_is_read(tmp_path: Path) -> None:
    """Of the same shape, with the same tokens: only its weights are others."""
    own = make_scripted(tmp_path / "own", "hermes")
    other = make_scripted(tmp_path / "other", "hermes")
    [weights] = other.glob("*.safetensors")
    tensors = {name: np.asarray(tensor) for name, tensor in load_file(weights).items()}
    save_file({name: tensor * (2 if "k_proj" in name else 1) + 0.25 for name, tensor in tensors.items()}, weights)
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "?" * 80}],
        "max_tokens": 4,
        "temperature": 0.0,
    }
    path = "/v1/chat/completions"

    tiers = ("--kv-host-gb", "0.01", "--hand-over", "all")

    def server(folder: Path, role: str) -> tuple[str, ...]:
        return str(folder), "--backend", "reference", "--name", "scripted", "--role", role, *tiers

    with (
        running_server(tmp_path / "r", *server(other, "prefill"), TWOSTROKE_FLEET_KEY=KEY) as reader,
        running_server(tmp_path / "w", *server(own, "decode"), TWOSTROKE_FLEET_KEY=KEY) as writer,
    ):
        answer = write(writer, path, body, read(reader, path, body))
        assert "another model" in answer.json()["timing"]["handoff"]["why_not"]
        assert told(answer) == told(writer.post(path, body))
        reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)
