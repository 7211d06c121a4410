"""A worker whose KV is on a machine that whoever writes does not know, as a pod that was added later; and one handoff
that comes to two workers. 0.0.0.0 stands for such a machine: it is reached here, and is no loopback address."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.fleets import KEY, read, servers, told, write
from tests.server.running import RunningServer
from twostroke.cluster import tickets

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("smollm2_path")]
PATH = "/v1/completions"
THERE = "0.0.0.0"
SIGNED_WITH = hashlib.sha256(KEY.encode()).digest()

Pair = tuple[RunningServer, RunningServer]


def body_of(seed: int) -> dict[str, Any]:
    tokens = random.Random(seed).choices(range(1000, 20_000), k=400)
    return {"model": "smollm2", "prompt": tokens, "max_tokens": 6, "temperature": 0.0}


def from_there(params: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """What the same worker would have signed on that machine."""
    handoff = tickets.opened(SIGNED_WITH, params, body["prompt"], {"127.0.0.1"})
    peer = json.dumps({**json.loads(handoff.peer), "host": THERE})
    return tickets.signed(SIGNED_WITH, replace(handoff, peer=peer), body["prompt"])


def handoff_of(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["timing"]["handoff"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with servers(tmp_path_factory.mktemp("alone"), "alone") as (server,):
        yield server


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with servers(tmp_path_factory.mktemp("reader"), "prefill") as (server,):
        yield server


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One knows this machine alone, one a network as well."""
    folders = tmp_path_factory.mktemp("strange"), tmp_path_factory.mktemp("knowing")
    with (
        servers(folders[0], "decode") as (strange,),
        servers(folders[1], "decode", options=("--peer", "0.0.0.0/8")) as (knowing,),
    ):
        yield strange, knowing


def test_a_prompt_that_was_read_on_an_unknown_machine_is_read_again(
    reader: RunningServer, writers: Pair, alone: RunningServer
) -> None:
    strange, knowing = writers
    body = body_of(1)
    params = from_there(read(reader, PATH, body), body)
    answer = write(strange, PATH, body, params)
    assert told(answer) == told(alone.post(PATH, body))
    assert handoff_of(answer)["why_not"] == f"{THERE} has its KV, and is none of this server's peers (--peer)"
    assert handoff_of(answer)["tokens"] == 0 and handoff_of(answer)["read_s"] > 0.0
    assert reader.metric("twostroke_kv_leases") == 1, "nobody has called the machine"

    answer = write(knowing, PATH, body, params)
    assert told(answer) == told(alone.post(PATH, body))
    assert handoff_of(answer)["why_not"] is None and handoff_of(answer)["tokens"] == 384, "that machine is reached"
    reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)


def test_what_nobody_of_the_fleet_signed_is_refused_wherever_it_points(reader: RunningServer, writers: Pair) -> None:
    body = body_of(2)
    params = from_there(read(reader, PATH, body), body)
    for bad, words in (
        ({**params, "twostroke": f"{params['twostroke'][:-8]}AAAAAAA="}, "its signature is another"),
        (from_there(read(reader, PATH, body_of(3)), body_of(3)), "was made for another prompt"),
    ):
        for writer in writers:
            answer = write(writer, PATH, body, bad)
            assert answer.status_code == 400 and words in answer.text


def test_a_handoff_that_comes_to_two_workers_gives_each_the_same_tokens(
    reader: RunningServer, writers: Pair, alone: RunningServer
) -> None:
    """Each worker remembers what it was given itself. A second one takes the KV, where it is still kept, or reads."""
    body = body_of(4)
    params = read(reader, PATH, body)
    expected = told(alone.post(PATH, body))
    first = write(writers[0], PATH, body, params)
    assert told(first) == expected and handoff_of(first)["tokens"] == 384
    reader.wait_until(lambda: reader.metric("twostroke_kv_leases") == 0)
    second = write(writers[1], PATH, body, params)
    assert told(second) == expected and handoff_of(second)["tokens"] == 0 and handoff_of(second)["why_not"]
    for writer in writers:
        again = write(writer, PATH, body, params)
        assert again.status_code == 400 and "was used before" in again.text
        writer.wait_until_idle()
