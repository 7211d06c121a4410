"""KV from one process's host slots into another's, by every transport: whole, or not at all, and never into slots that
were called free. `sockets` is what NIXL is held against; `nixl-tcp` is NIXL as between two hosts."""

from __future__ import annotations

import hashlib
import json
import secrets
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from tests.cluster.transfers import (
    KEY,
    LIMIT_S,
    OTHER_KEY,
    SOON_S,
    WAYS,
    Engine,
    Start,
    fetched,
    needs_nixl,
    serves_still,
    wait_for,
)
from twostroke.cluster.transfer import TRANSPORTS, choose, nixl, nixl_agent, open_transport
from twostroke.cluster.transfer.channel import RefusedError, TransferError
from twostroke.cluster.transfer.interface import Contact, TransferConfig
from twostroke.cluster.transfer.lines import Lines
from twostroke.cluster.transfer.listener import MOST_STRANGERS
from twostroke.cluster.transfer.sockets import MOST_FETCHES
from twostroke.core.errors import BadRequestError


def _contact(**changed: object) -> str:
    fields = {"transport": "sockets", "host": "127.0.0.1", "port": 1, "engine_id": "a"} | changed
    return json.dumps(fields)


def all_of(byte: int, num_bytes: int) -> str:
    return hashlib.sha256(bytes([byte]) * num_bytes).hexdigest()


@pytest.fixture(scope="module", params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """An owner and a reader that no test of theirs harms."""
    engines = Engine(request.param, "owner", kept=True), Engine(request.param, "reader", kept=True)
    engines[0].do("fill", seed=1)
    yield engines
    for engine in engines:
        engine.end()


# What goes well


@pytest.mark.parametrize("count", [1, 2, 63, 400])
def test_bytes_are_the_same_wherever_they_lie(pair: tuple[Engine, Engine], count: int) -> None:
    owner, reader = pair
    remote, local = owner.some(count, seed=count), reader.some(count, seed=count)
    assert [group for group, _ in remote] == [group for group, _ in local]
    reader.do("scribble", places=reader.places(), byte=0)
    owner.do("offer", lease=f"many-{count}", places=remote)
    state = fetched(reader, owner, f"many-{count}", remote, local)
    assert state["arrived"] and state["is_settled"] and state["error"] is None and state["took_s"] > 0
    assert state["num_bytes"] == sum(owner.sizes[group] for group, _ in remote)
    assert reader.do("digests", places=local) == owner.expected(1, remote)
    untouched = [place for place in reader.places() if place not in set(local)]
    assert reader.do("digests", places=untouched) == [all_of(0, reader.sizes[group]) for group, _ in untouched]


def test_an_offer_grows_with_its_prompt(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    owner.do("offer", lease="grows", places=[(0, 3)])
    assert "not in lease" in fetched(reader, owner, "grows", [(0, 3), (0, 4)], [(0, 0), (0, 1)])["error"]
    owner.do("offer", lease="grows", places=[(0, 4)])
    assert fetched(reader, owner, "grows", [(0, 3), (0, 4)], [(0, 0), (0, 1)])["arrived"]


def test_fetches_beside_each_other_do_not_mix(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    slices = [[(0, slot) for slot in range(first, first + 20)] for first in range(0, 240, 20)]
    for number, places in enumerate(slices):
        owner.do("offer", lease=f"beside-{number}", places=places)
    targets = slices[::-1]
    numbers = [
        reader.do("fetch", peer=owner.contact, lease=f"beside-{number}", remote=remote, local=local, seconds=LIMIT_S)
        for number, (remote, local) in enumerate(zip(slices, targets, strict=True))
    ]
    for number, remote, local in zip(numbers, slices, targets, strict=True):
        assert reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)["arrived"]
        assert reader.do("digests", places=local) == owner.expected(1, remote)


def test_both_may_own_and_read_at_once(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    two.do("fill", seed=2)
    for engine in pair:
        engine.do("offer", lease="both", places=engine.places(0)[:100])
    given = {"lease": "both", "remote": one.places(0)[:100], "seconds": LIMIT_S}
    targets = one.places(0)[150:250]
    first = one.do("fetch", peer=two.contact, local=targets, **given)
    second = two.do("fetch", peer=one.contact, local=targets, **given)
    assert one.do("until", number=first, what="is_over", limit_s=LIMIT_S)["arrived"]
    assert two.do("until", number=second, what="is_over", limit_s=LIMIT_S)["arrived"]
    assert one.do("digests", places=targets) == two.expected(2, two.places(0)[:100])
    assert two.do("digests", places=targets) == one.expected(1, one.places(0)[:100])
    one.do("fill", seed=1)


def test_notes_come_of_leases_that_are_on_offer(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    owner.do("offer", lease="noted", places=[(0, 0)])
    before = len(owner.do("notes"))
    reader.do("beat", peer=owner.contact, leases=["noted", "never-was"])
    reader.do("beat", peer=owner.contact, leases=["noted"])
    wait_for(lambda: len(owner.do("notes")) > before)
    reader.do("release", peer=owner.contact, lease="noted")
    wait_for(lambda: ["done", "noted", None] in owner.do("notes"))
    news = owner.do("notes")[before:]
    assert {tuple(note) for note in news} == {("alive", "noted", None), ("done", "noted", None)}
    assert news[-1][0] == "done"


def test_a_fetch_is_told_once_settled_and_once_over(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    owner.do("offer", lease="told", places=[(0, 0)])
    before = len(reader.do("notes"))
    number = reader.do("fetch", peer=owner.contact, lease="told", remote=[(0, 0)], local=[(0, 9)], seconds=LIMIT_S)
    reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)
    wait_for(lambda: len(reader.do("notes")) >= before + 2)
    assert reader.do("notes")[before:] == [["settled", "told", number], ["over", "told", number]]


# What is refused


@pytest.mark.parametrize(
    ("lease", "remote", "reason"),
    [
        ("unknown", [(0, 0)], "no lease unknown"),
        ("refused", [(0, 5)], "slot 5 of KV group 0 is not in lease"),
        ("refused", [(2, 0)], "other sizes"),
        ("gone", [(0, 0)], "no lease gone"),
    ],
)
def test_what_is_not_on_offer_is_refused(pair: tuple[Engine, Engine], lease: str, remote: list, reason: str) -> None:
    owner, reader = pair
    owner.do("offer", lease="refused", places=[(0, 0), (2, 0)])
    owner.do("offer", lease="gone", places=[(0, 0)])
    assert owner.do("withdraw", lease="gone") is True
    reader.do("scribble", places=[(0, 7)], byte=7)
    before = reader.do("digests", places=[(0, 7)])
    state = fetched(reader, owner, lease, remote, [(0, 7)])
    assert not state["arrived"] and state["is_over"] and reason in state["error"]
    assert reader.do("digests", places=[(0, 7)]) == before
    serves_still(owner, reader)


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_key_opens_nothing(start: Start, way: str) -> None:
    owner, stranger = start(way, "owner"), start(way, "stranger", key=OTHER_KEY)
    owner.do("fill", seed=1)
    owner.do("offer", lease="a", places=[(0, 0)])
    state = fetched(stranger, owner, "a", [(0, 0)], [(0, 0)])
    assert not state["arrived"] and "key" in state["error"]
    stranger.do("release", peer=owner.contact, lease="a")
    time.sleep(0.1)
    assert owner.do("notes") == []


def test_garbage_at_the_port_harms_nobody(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    silent = []
    for count in (0, 1, 40, 71, 72, 100, 5000):
        connection = socket.create_connection(("127.0.0.1", owner.port), LIMIT_S)
        connection.sendall(secrets.token_bytes(count))
        if count < 72:
            silent.append(connection)  # its greeting is not whole, and never will be
            continue
        assert len(_rest(connection)) <= 40  # the listener's nonce, and not a byte of an answer
        connection.close()
    serves_still(owner, reader)
    for connection in silent:
        connection.close()


def _rest(connection: socket.socket) -> bytes:
    found = b""
    try:
        while more := connection.recv(4096):
            found += more
    except ConnectionResetError:
        pass
    return found


def test_a_message_of_a_member_that_makes_no_sense_ends_its_connection_alone(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    lines, peer = Lines(bytes.fromhex(KEY)), Contact.read(owner.contact)
    until_s = time.monotonic() + LIMIT_S
    channel = lines.take(peer, until_s)
    for message in (
        {},
        {"ask": "fly"},
        {"ask": ["read"]},
        {"ask": "read", "lease": 3},
        {"ask": "read", "lease": "x", "sizes": [], "places": [[0, True]]},
    ):
        channel.send(message, until_s)
        assert "error" in channel.receive(until_s)
    channel.send_views([memoryview(b"\x00\x00\x00\x05[[[[[")], until_s)
    with pytest.raises(TransferError) as ended:
        channel.receive(until_s)
    assert not isinstance(ended.value, RefusedError)
    channel.close()
    channel = lines.take(peer, until_s)
    channel.send_views([memoryview(b"\xff\xff\xff\xff")], until_s)
    with pytest.raises(TransferError):
        channel.receive(until_s)
    channel.close()
    serves_still(owner, reader)


# What goes wrong; `test_transfer_faults.py` has those who are killed, stopped or closed


def test_a_deadline_that_has_passed_is_an_error(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    owner.do("offer", lease="late", places=[(0, 0)])
    state = fetched(reader, owner, "late", [(0, 0)], [(0, 0)], seconds=-1.0)
    assert state["is_over"] and "deadline" in state["error"]
    serves_still(owner, reader)


def test_nobody_there_is_an_error(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nobody = Contact(Contact.read(owner.contact).transport, "127.0.0.1", port, "nobody").described()
    number = reader.do("fetch", peer=nobody, lease="a", remote=[(0, 0)], local=[(0, 0)], seconds=SOON_S)
    state = reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)
    assert state["is_over"] and "no connection" in state["error"]
    other = Contact.read(owner.contact)
    wrong = Contact(other.transport, other.host, other.port, "somebody-else").described()
    number = reader.do("fetch", peer=wrong, lease="a", remote=[(0, 0)], local=[(0, 0)], seconds=SOON_S)
    assert "another engine" in reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)["error"]


def test_silent_callers_keep_nobody_out(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    held = [socket.create_connection(("127.0.0.1", owner.port)) for _ in range(2 * MOST_STRANGERS)]
    serves_still(owner, reader)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("way", ["sockets"])
def test_too_many_fetches_are_refused_and_not_queued(start: Start, way: str) -> None:
    owner, reader = start(way, "owner"), start(way, "reader")
    owner.do("offer", lease="a", places=[(0, 0)])
    reader.do("fill", seed=1)
    owner.signal(signal.SIGSTOP)
    given = {"peer": owner.contact, "lease": "a", "remote": [(0, 0)], "seconds": LIMIT_S}
    numbers = [reader.do("fetch", local=[(0, slot)], **given) for slot in range(MOST_FETCHES + 3)]
    refused = [reader.do("state", number=number)["error"] for number in numbers[-3:]]
    assert all(error is not None and "the most at once" in error for error in refused)
    owner.signal(signal.SIGCONT)
    for number in numbers:
        assert reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)["is_over"]
    serves_still(owner, reader)


def test_nothing_turns_while_nothing_is_read(pair: tuple[Engine, Engine]) -> None:
    owner, reader = pair
    owner.do("offer", lease="idle", places=owner.places())
    serves_still(owner, reader)
    before = [engine.do("processor_s") for engine in pair]
    time.sleep(0.5)
    assert all(engine.do("processor_s") - began < 0.05 for engine, began in zip(pair, before, strict=True))


@needs_nixl
@pytest.mark.parametrize("ways", [("nixl", "sockets"), ("sockets", "nixl")], ids=str)
def test_one_side_may_be_without_nixl(start: Start, ways: tuple[str, str]) -> None:
    owner, reader = (start(way, name) for way, name in zip(ways, ("owner", "reader"), strict=True))
    owner.do("fill", seed=1)
    owner.do("offer", lease="a", places=owner.places(0))
    assert fetched(reader, owner, "a", owner.places(0)[:9], reader.places(0)[9:18])["arrived"]
    assert reader.do("digests", places=reader.places(0)[9:18]) == owner.expected(1, owner.places(0)[:9])


# What is told before anything is opened


class Nothing:
    def view(self, group: int, slot: int) -> memoryview:
        raise AssertionError("there are no slots")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "pigeons"}, "no transport 'pigeons'"),
        ({"key": b"short"}, "at least 16"),
        ({"engine_id": "a b"}, "engine's id"),
        ({"host": "0.0.0.0"}, "address they"),
        ({"host": "no.such.host.invalid"}, "cannot be served"),
    ],
)
def test_what_cannot_be_opened_is_said_in_a_sentence(given: dict, reason: str) -> None:
    settings = {"name": "sockets", "slots": Nothing(), "places": [], "key": b"k" * 32, "engine_id": "a"} | given
    with pytest.raises(BadRequestError, match=reason):
        open_transport(**settings)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(BadRequestError, match="another host or port"):
        open_transport("sockets", Nothing(), [], b"k" * 32, engine_id="a", port=taken.getsockname()[1])


def test_auto_takes_the_first_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    name, why = choose("auto")
    assert name == ("sockets" if nixl.missing() else "nixl") and name in TRANSPORTS
    monkeypatch.setattr(nixl_agent, "LIBRARIES", ("no_such_library",))
    name, why = choose("auto")
    assert name == "sockets" and "pip install --no-deps" in why
    with pytest.raises(BadRequestError, match="pip install --no-deps"):
        choose("nixl")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        "[" * 5000,
        '{"transport":"sockets","host":"h","port":1}',
        _contact(port="1"),
        _contact(port=True),
        _contact(port=0),
        _contact(port=65536),
        _contact(host=""),
        _contact(host="a b"),
        _contact(host=7),
        _contact(engine_id="x" * 200),
        _contact(engine_id=None),
        _contact(transport=3),
        _contact(further=1),
        _contact(host="h" * 2000),
    ],
)
def test_a_contact_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadRequestError, match="contact"):
        Contact.read(text)


def test_a_contact_survives_its_text() -> None:
    contact = Contact("sockets", "10.0.0.1", 5600, "10.0.0.1-17-ab12")
    assert Contact.read(contact.described()) == contact


def test_the_key_is_in_no_log() -> None:
    assert "secret" not in repr(TransferConfig("a", b"secret" * 4))
