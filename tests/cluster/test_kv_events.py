"""KV events: whoever follows them knows what the engine would find, and what was missed can be had again."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("msgpack")

from tests.cluster.follower import Follower, Subscription
from tests.kv.test_ledger import BLOCK_SIZE, Ledger
from tests.server.running import RunningServer, running_server
from twostroke.cluster.endpoints import EventEndpoints, read_endpoint
from twostroke.cluster.kv_events import EVERYBODYS, Kept, KVEventPublisher, KVEvents, block_hash
from twostroke.core.errors import BackendError, BadRequestError
from twostroke.kv.prefix_index import PrefixIndex

FREE = EventEndpoints("tcp://127.0.0.1:0", "tcp://127.0.0.1:0")


def listened(ledger: Ledger) -> KVEvents:
    ledger.index.listener = events = KVEvents(ledger.layout.groups, BLOCK_SIZE)
    return events


def known(index: PrefixIndex, group: int) -> set[int]:
    return {
        block_hash(entry.node)
        for entry in index.entries()
        if entry.blocks[group] is not None and entry.node.namespace == EVERYBODYS
    }


@pytest.mark.parametrize("groups", [((None, 12),), ((8, 12), (None, 16))], ids=["one group", "a window beside"])
@pytest.mark.parametrize("seed", range(4))
def test_events_follow_the_index(groups: tuple[tuple[int | None, int], ...], seed: int) -> None:
    """Through hits, evictions, salts, tainted answers and a clearing."""
    ledger, rng, follower = Ledger(*groups), random.Random(seed), Follower()
    events, main = listened(ledger), len(groups) - 1
    hits = 0
    for number in range(120):
        beginning = [7] * rng.choice([0, 4, 8, 12]) + [rng.randrange(3) for _ in range(rng.randrange(1, 12))]
        salt = rng.choice(["", "", "", "own"])
        sequence = ledger.sequence(beginning, salt=salt)
        if not salt:
            hits += follower.cached(beginning) > 0
            if len(groups) == 1:
                assert ledger.match(sequence).num_tokens == follower.cached(beginning)
        ledger.start(sequence)
        ledger.compute(sequence, len(beginning))
        ledger.release(sequence, tainted=rng.random() < 0.1)
        if number == 80:
            ledger.clear_prefixes()
        for event in events.take():
            follower.apply(event)
        assert set(follower.blocks.values()) == known(ledger.index, main)
    assert hits > 10


def test_blocks_behind_one_another_are_one_event() -> None:
    ledger = Ledger((None, 10))
    events = listened(ledger)
    assert events.take() == [{"type": "AllBlocksCleared"}], "a reader forgets what an engine before this one had"
    ledger.run(ledger.sequence(range(14)))
    [stored] = events.take()
    assert stored["token_ids"] == list(range(12)) and len(stored["block_hashes"]) == 3
    assert stored["parent_block_hash"] is None and events.take() == []
    ledger.run(ledger.sequence([*range(8), 50, 51, 52, 53]))
    [branch] = events.take()
    assert branch["parent_block_hash"] == stored["block_hashes"][1] and branch["token_ids"] == [50, 51, 52, 53]
    ledger.clear_prefixes()
    removed, cleared = events.take()
    assert sorted(removed["block_hashes"]) == sorted(stored["block_hashes"] + branch["block_hashes"])
    assert cleared == {"type": "AllBlocksCleared"}


def test_what_is_kept_for_repeating_is_bounded() -> None:
    kept = Kept(most=3, most_bytes=100)
    for number in range(5):
        kept.add(number, b"x" * 10)
    assert [number for number, _ in kept.since(0)] == [2, 3, 4] and [number for number, _ in kept.since(4)] == [4]
    kept.add(5, b"x" * 95)
    assert [number for number, _ in kept.since(0)] == [5]


def test_a_publisher_repeats_and_bears_nonsense() -> None:
    ledger = Ledger((None, 10))
    publisher = KVEventPublisher(listened(ledger), FREE, "kv@here@small")
    reader = Subscription(publisher.endpoints.events, publisher.endpoints.replay, b"kv@here")
    try:
        publisher.publish()
        publisher.publish()  # nothing changed
        ledger.run(ledger.sequence(range(9)))
        publisher.publish()
        reader.replay.send_multipart([b"what", b"is", b"this"])
        reader.replay.send_multipart([b"", b"short"])
        follower = Follower()
        for number, message in reader.again(0):
            follower.take(number, message)
        assert follower.numbers == [0, 1] and follower.cached(list(range(9))) == 8
        assert reader.again(7) == []
        first, latest = 9, 1
        while not reader.events.poll(20):  # a subscription takes its time to arrive: what came before is not sent
            ledger.run(ledger.sequence(range(first, first + 9)))
            publisher.publish()
            first, latest = first + 9, latest + 1
        live = reader.new(latest)
        assert {topic for topic, _, _ in live} == {b"kv@here@small"}
        assert reader.again(live[0][1]) == [(number, message) for _, number, message in live]
        taken = EventEndpoints(publisher.endpoints.events, "tcp://127.0.0.1:0")
        with pytest.raises(BackendError, match="cannot be published at tcp"):
            KVEventPublisher(KVEvents(ledger.layout.groups, BLOCK_SIZE), taken)
    finally:
        reader.close()
        publisher.close()


@pytest.mark.parametrize(
    ("text", "events", "replay"),
    [
        ("5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        (":5557", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"),
        ("10.0.0.7:5557", "tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),
        ("tcp://*:5557", "tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::1]:0", "tcp://[::1]:0", "tcp://[::1]:0"),
        ("ipc:///run/kv", "ipc:///run/kv", "ipc:///run/kv.replay"),
    ],
)
def test_an_endpoint_is_this_machine_s_own_unless_it_says_otherwise(text: str, events: str, replay: str) -> None:
    assert read_endpoint(text) == EventEndpoints(events, replay)


@pytest.mark.parametrize("text", ["", "here", "tcp://x", "70000", "udp://a:1", "ipc://", "a:b:1", "-1"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="kv_events must be a port"):
        read_endpoint(text)


# A real server


@pytest.fixture(scope="module")
def server(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With so little KV that prefixes have to go: some 1,100 tokens."""
    options = ("smollm2", "--backend", "cpu", "--max-context", "512", "--kv-memory", "28MB", "--threads", "1")
    log = tmp_path_factory.mktemp("server") / "log"
    with running_server(log, *options, "--kv-events", "0", "--speculate", "off") as running:
        yield running


def test_whoever_follows_the_events_knows_what_the_server_will_find(server: RunningServer) -> None:
    said = re.search(r"KV events: published at (\S+), repeated at (\S+)", server.log())
    assert said is not None and said[1].startswith("tcp://127.0.0.1:")
    reader, follower, rng = Subscription(said[1], said[2]), Follower(), random.Random(5)
    live: list[tuple[int, bytes]] = []
    try:
        for number, message in reader.again(0):  # from before it subscribed
            follower.take(number, message)
        families = [[rng.randrange(100, 40000) for _ in range(100)] for _ in range(4)]
        found = []
        for turn in range(14):
            prompt = families[turn % 3 if turn < 10 else 3] + [rng.randrange(100, 40000) for _ in range(60)]
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            expected = follower.cached(prompt)
            usage = server.post("/v1/completions", body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == expected, turn
            found.append(expected)
            server.wait_until_idle()
            published = reader.again(len(follower.numbers))
            for _, number, message in reader.new(published[-1][0]) if published else ():
                follower.take(number, message)
                live.append((number, message))
        assert max(found) >= 96 and found.count(0) >= 4
        assert b"BlockRemoved" in b"".join(message for _, message in live), "some had to go"
        assert follower.numbers == list(range(len(follower.numbers))), "every message came, once"
        repeated = dict(reader.again(0))
        assert all(repeated[number] == message for number, message in live)
    finally:
        reader.close()


def test_salted_prefixes_are_not_told(server: RunningServer) -> None:
    said = re.search(r"KV events: published at (\S+), repeated at (\S+)", server.log())
    assert said is not None
    reader = Subscription(said[1], said[2])
    try:
        before = len(reader.again(0))
        body = {"prompt": [11] * 100, "max_tokens": 2, "cache_salt": "mine"}
        assert server.post("/v1/completions", body).status_code == 200
        server.wait_until_idle()
        told = b"".join(message for _, message in reader.again(before))
        assert b"BlockStored" not in told
    finally:
        reader.close()
