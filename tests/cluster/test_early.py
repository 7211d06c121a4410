"""Real servers: KV of a long prompt moves while the prompt is read. Most of it is there before its reader has answered,
and what of it nobody comes for is freed, whoever dies."""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.fleets import ASKS, KEY, NOBODY, named_by_vllm_router, read, servers, told, write
from tests.cluster.routing import until
from tests.cluster.test_fleet import prompt_of
from tests.cluster.test_fleet_up import fleet as running_fleet
from tests.server.running import CLIENT, RunningServer
from twostroke.cluster import tickets
from twostroke.cluster.transfer import announcements, open_transport
from twostroke.core.handoff import Announcement
from twostroke.kv.tiers.early import EARLY_S

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(900)]
PATH = "/v1/completions"
CHUNK, BLOCK = 64, 16
READS = ("--max-tokens-per-step", str(CHUNK))
Fleet = tuple[RunningServer, RunningServer, RunningServer]


def second(folder: Path) -> Path:
    """For the logs of servers with options of their own."""
    (folder / "second").mkdir()
    return folder / "second"


@pytest.fixture(scope="module")
def fleet(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("early")
    with (
        servers(folder, "prefill", options=READS) as (reads,),
        servers(second(folder), "decode", "alone") as (writes, alone),
    ):
        acquaint(reads, writes, 1)
        yield reads, writes, alone


def asked(seed: int, num_tokens: int = 1500) -> dict[str, Any]:
    drawn = random.Random(seed)
    prompt = [drawn.randrange(1000, 40_000) for _ in range(num_tokens)]
    return {"model": "smollm2", "prompt": prompt, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def acquaint(reads: RunningServer, writes: RunningServer, seed: int) -> None:
    """A worker listens to whom it has taken something from."""
    body = asked(seed, 100)
    answer = write(writes, PATH, body, read(reads, PATH, body))
    assert answer.json()["timing"]["handoff"]["why_not"] is None


def read_for(reads: RunningServer, address: str, body: dict[str, Any]) -> httpx.Response:
    """The first leg, whatever its answer."""
    leg = {**body, "max_tokens": 1, "kv_transfer_params": ASKS}
    return reads.post(PATH, leg, headers=named_by_vllm_router(address))


def address_of(server: RunningServer) -> str:
    return server.address.removeprefix("http://")


def handoff_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["timing"]["handoff"]
    return found


def num_early(server: RunningServer) -> float:
    """Blocks that it holds for a request that has not come."""
    return server.metric("twostroke_kv_early_blocks")


def test_most_of_it_is_there_before_the_reader_has_answered(fleet: Fleet) -> None:
    reads, writes, alone = fleet
    body = asked(2)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_for, reads, address_of(writes), body)
        # The reader stands still in the midst of the prompt: however slow this machine is, it has not answered.
        writes.wait_until(lambda: num_early(writes) > 0 or reading.done())
        with reads.held_engine():
            assert not reading.done()
            there = num_early(writes)
        params = reading.result().json()["kv_transfer_params"]
    answer = write(writes, PATH, body, params)
    assert told(answer) == told(alone.post(PATH, body))
    handoff = handoff_of(answer)
    print(f"{there:g} of {1499 // BLOCK} blocks in the midst; {handoff['sentence']}")
    assert there > 0 and handoff["why_not"] is None and handoff["tokens"] == 1499 // BLOCK * BLOCK
    assert handoff["early_bytes"] > 0.5 * handoff["bytes"] > 1e6
    assert "before it was asked for" in handoff["sentence"]
    reads.wait_until(lambda: reads.metric("twostroke_kv_leases") == 0)
    writes.wait_until(lambda: num_early(writes) == 0)
    writes.wait_until_idle()


def test_a_named_writer_that_is_another_gets_nothing(fleet: Fleet) -> None:
    reads, writes, alone = fleet
    body = asked(3, 400)
    params = read(reads, PATH, body, NOBODY)
    answer = write(writes, PATH, body, params)
    assert told(answer) == told(alone.post(PATH, body))
    assert handoff_of(answer)["early_bytes"] == 0 and handoff_of(answer)["why_not"] is None


def test_what_nobody_comes_for_is_freed(fleet: Fleet) -> None:
    reads, writes, alone = fleet
    body, unused = asked(4), writes.metric("twostroke_handoff_unused_bytes_total")
    began_s = time.monotonic()
    params = read(reads, PATH, body)
    assert params["remote_num_tokens"] == 1499 // BLOCK * BLOCK
    writes.wait_until(lambda: num_early(writes) > 0)
    writes.wait_until(lambda: num_early(writes) == 0)
    assert time.monotonic() - began_s > EARLY_S
    assert writes.metric("twostroke_handoff_unused_bytes_total") > unused
    reads.wait_until(lambda: reads.metric("twostroke_kv_leases") == 0)
    answer = writes.post(PATH, body)
    assert told(answer) == told(alone.post(PATH, body))
    assert answer.json()["timing"]["prefill"]["cached_tokens"] == 0, "what has no name is found by nobody"
    for server in (reads, writes):
        server.wait_until_idle()


def test_a_reader_that_was_killed_midway_costs_time_and_no_answer(fleet: Fleet, tmp_path: Path) -> None:
    _, writes, alone = fleet
    body = asked(5)
    with servers(tmp_path, "prefill", options=READS) as (reads,):
        acquaint(reads, writes, 6)
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read_for, reads, address_of(writes), body)
            writes.wait_until(lambda: num_early(writes) > 0)
            os.kill(reads.engine_pid(), signal.SIGKILL)
            assert reading.result().status_code >= 500
        # Its router has nothing to pass on.
        answer = writes.post(PATH, body)
        assert told(answer) == told(alone.post(PATH, body))
        assert answer.json()["timing"]["prefill"]["cached_tokens"] == 0
        writes.wait_until(lambda: num_early(writes) == 0)
        writes.wait_until_idle()


class Slots:
    """Of a member of the fleet that tells what is not so."""

    def __init__(self, num_bytes: int, count: int) -> None:
        self._slots = [memoryview(bytearray(num_bytes)) for _ in range(count)]

    def view(self, group: int, slot: int) -> memoryview:
        return self._slots[slot]


def test_what_was_forged_or_said_before_is_refused(fleet: Fleet) -> None:
    reads, writes, alone = fleet
    key, other_key, body = hashlib.sha256(KEY.encode()).digest(), b"o" * 32, asked(7, 100)
    handoff = tickets.opened(key, read(reads, PATH, body, NOBODY), body["prompt"], {"127.0.0.1"})
    slots = Slots(handoff.formats.groups[0].num_bytes, 4)
    places = [(0, slot) for slot in range(4)]
    transport, _ = open_transport("sockets", slots, places, key, engine_id="liar")
    try:
        # Somebody whom the writer took a ticket of: it has nothing, and is listened to from then on.
        contact = transport.contact.described()
        params = tickets.signed(key, replace(handoff, peer=contact, lease_id="never"), body["prompt"])
        answer = write(writes, PATH, body, params)
        assert told(answer) == told(alone.post(PATH, body)) and "lease" in handoff_of(answer)["why_not"]
        until(lambda: transport.who_listens("") is not None)
        listener = transport.who_listens("") or ""
        assert transport.who_listens(address_of(writes)) == listener
        given = Announcement("lease", contact, 0, tuple(places), handoff.model, handoff.formats)
        honest, base = announcements.signed(key, listener, given), refused(writes)
        forged = [
            honest.replace('"number":0', '"number":1'),
            announcements.signed(other_key, listener, given),
            announcements.signed(key, "somebody", given),
            announcements.signed(key, listener, replace(given, peer=handoff.peer)),
        ]
        transport.offer("lease", places)
        for word in forged:
            transport.tell(listener, word)
        writes.wait_until(lambda: refused(writes) == base + len(forged))
        assert num_early(writes) == 0
        transport.tell(listener, honest)
        writes.wait_until(lambda: num_early(writes) == 4)
        transport.tell(listener, honest)
        writes.wait_until(lambda: refused(writes) == base + len(forged) + 1)
        assert num_early(writes) == 4
        writes.wait_until(lambda: num_early(writes) == 0)
        writes.wait_until_idle()
    finally:
        transport.close()


def refused(server: RunningServer) -> float:
    return server.metric("twostroke_handoff_refused_announcements_total")


@pytest.mark.parametrize("router", ["vllm-router", "smg"])
def test_through_a_router(smollm2_path: Path, tmp_path: Path, fleet: Fleet, router: str) -> None:
    """vllm-router names one of two writers. smg names none: then it is the only one there is."""
    pytest.importorskip(router.replace("-", "_"))
    num_writers = 2 if router == "vllm-router" else 1
    pools = ("--prefill", "1", "--decode", str(num_writers), "--router", router)
    memory = ("--max-context", "2048", "--kv-host-gb", "0.3", "--threads", "1", *READS)
    with running_fleet(tmp_path, smollm2_path, *pools, *memory) as running:
        model = running.client().models.list().data[0].id
        shares = []
        for seed in range(10, 10 + 2 * num_writers + 2):
            body = prompt_of(seed, 600)
            answer = CLIENT.post(f"{running.url}{PATH}", json={**body, "model": model}, timeout=300)
            handoff = handoff_of(answer)
            print(handoff["sentence"])
            assert answer.json()["choices"] == fleet[2].post(PATH, body).json()["choices"]
            assert handoff["why_not"] is None
            shares.append(handoff["early_bytes"] / handoff["bytes"])
        assert shares[:num_writers] == [0.0] * num_writers, "whoever has taken nothing yet listens to nobody"
        assert min(shares[num_writers:]) > 0.5, shares
        urls = re.findall(r"^(?:prefill|decode)\S* +(http://\S+) ", running.said(), re.MULTILINE)
        assert len(urls) == 1 + num_writers
        for url in urls:
            until(lambda url=url: _holds_nothing(url), 40)  # type: ignore[misc]


def _holds_nothing(url: str) -> bool:
    lines = CLIENT.get(f"{url}/metrics").text.splitlines()
    names = ("twostroke_running ", "twostroke_kv_leases ", "twostroke_kv_early_blocks ")
    return all(float(line.split()[1]) == 0 for line in lines if line.startswith(names))
