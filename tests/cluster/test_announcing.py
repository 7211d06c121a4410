"""What an owner tells those who listen to it: the words that it said, to those that it meant, from those who have the
key; and nobody else's trouble."""

from __future__ import annotations

import base64
import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.cluster.transfers import LIMIT_S, OTHER_KEY, WAYS, Engine, Start, serves_still, wait_for
from twostroke.cluster import tickets
from twostroke.cluster.transfer import announcements, audience
from twostroke.cluster.transfer.audience import MOST_WAITING, Audience
from twostroke.cluster.transfer.channel import Channel, RefusedError, TransferError
from twostroke.core.errors import BadRequestError
from twostroke.core.handoff import Announcement
from twostroke.core.kv_blocks import BlockFormat, KVFormat

KEY, OTHER = b"k" * 32, b"o" * 32
NOW_S = 1_700_000_000.0
FORMATS = KVFormat("cpu", "bf16", 16, (BlockFormat((0, 1), None, "bf16", 2, (("layer", 2), ("number", 64))),))
GIVEN = Announcement("lease-1", "the owner's contact", 3, ((0, 4), (0, 9)), "model", FORMATS)


def hears(reader: Engine, count: int, limit_s: float = LIMIT_S) -> list[list[str]]:
    found: list[list[str]] = reader.do("heard", count=count, limit_s=limit_s)
    return found


def listens(reader: Engine, owner: Engine, *names: str) -> None:
    """It is called again until it does: an ear that lost its owner may not have noticed yet."""

    def is_heard() -> bool:
        reader.do("listen", peer=owner.contact, names=list(names))
        return bool(owner.do("who_listens", name=names[0]) == names[0])

    wait_for(is_heard)


@pytest.mark.parametrize("way", WAYS[:2])
def test_words_come_once_in_their_order_to_whom_they_are_meant_for(start: Start, way: str) -> None:
    owner, one, two = start(way, "owner"), start(way, "one"), start(way, "two")
    assert owner.do("who_listens", name="") is None
    listens(one, owner, "one", "10.0.0.8:8000")
    assert owner.do("who_listens", name="10.0.0.8:8000") == "one" == owner.do("who_listens", name="")
    listens(two, owner, "two", "[::1]:8000")
    assert owner.do("who_listens", name="") is None, "which of them, nobody knows"
    assert owner.do("who_listens", name="three") is None
    said = [f"word {number} " + "x" * (number % 7 * 1000) for number in range(200)]
    owner.do("tell", name="one", words=said[::2])
    owner.do("tell", name="[::1]:8000", words=said[1::2])
    owner.do("tell", name="nobody", words=["lost"])
    assert hears(one, 100) == [["owner", word] for word in said[::2]]
    assert hears(two, 100) == [["owner", word] for word in said[1::2]]
    assert hears(one, 1, limit_s=0.1) == [] == hears(two, 1, limit_s=0.1)
    serves_still(owner, one)
    one.do("listen", peer=owner.contact, names=["one", "10.0.0.8:8000"])
    owner.do("tell", name="one", words=["once"])
    assert hears(one, 2, limit_s=1.0) == [["owner", "once"]], "asked for twice it listens once"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_listens_no_more_is_noticed_and_holds_nobody(start: Start, sign: int) -> None:
    owner, one, two = (start("sockets", name) for name in ("owner", "one", "two"))
    listens(one, owner, "one")
    listens(two, owner, "two")
    one.signal(sign)
    for _ in range(3):  # more than it could keep
        owner.do("tell", name="one", words=["x" * 1000] * MOST_WAITING)
    owner.do("tell", name="two", words=["well"])
    assert hears(two, 1) == [["owner", "well"]]
    if sign == signal.SIGKILL:
        wait_for(lambda: owner.do("who_listens", name="one") is None)
        assert owner.do("who_listens", name="") == "two"
    assert owner.do("close") < LIMIT_S / 2


def test_an_owner_that_died_is_listened_to_again_when_it_is_back(start: Start) -> None:
    owner, one = start("sockets", "owner"), start("sockets", "one")
    listens(one, owner, "one")
    port = owner.port
    owner.signal(signal.SIGKILL)
    one.do("listen", peer=owner.contact, names=["one"])  # to nobody
    second = start("sockets", "owner", port=port)
    listens(one, second, "one")
    second.do("tell", name="one", words=["again"])
    assert hears(one, 1) == [["owner", "again"]]
    assert one.do("close") < LIMIT_S / 2


def test_whoever_has_not_the_key_hears_nothing(start: Start) -> None:
    owner, stranger = start("sockets", "owner"), start("sockets", "stranger", key=OTHER_KEY)
    stranger.do("listen", peer=owner.contact, names=["stranger"])
    assert hears(stranger, 1, limit_s=0.5) == []
    assert owner.do("who_listens", name="stranger") is None


@pytest.fixture
def channel() -> Iterator[Channel]:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as called:
        accepted, _ = door.accept()
        with accepted:
            yield Channel(called)


@pytest.mark.parametrize("names", [None, [], "one", [""], [7], ["x"] * 9, ["x" * 129]])
def test_names_that_are_none_are_refused(channel: Channel, names: Any) -> None:
    with pytest.raises(RefusedError, match="has 1 to 8 names"):
        Audience().serve(channel, {"ask": "listen", "names": names})


def test_no_more_listen_than_may(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audience, "MOST_SEATS", 0)
    with pytest.raises(RefusedError, match="0 listen, and no more may"):
        Audience().serve(channel, {"ask": "listen", "names": ["one"]})


def test_an_audience_that_is_closed_sends_all_away(channel: Channel) -> None:
    ended = Audience()
    ended.close()
    with pytest.raises(TransferError, match="were closed"):
        ended.serve(channel, {"ask": "listen", "names": ["one"]})
    assert ended.find("one") is None


def opened(word: str, **changes: Any) -> Announcement:
    given = {"peer": GIVEN.peer, "names": ("two", "one"), "now_s": NOW_S + 1.0, **changes}
    return announcements.opened(KEY, word, given["peer"], given["names"], given["now_s"])


def test_what_was_signed_comes_out() -> None:
    assert opened(announcements.signed(KEY, "one", GIVEN, NOW_S)) == GIVEN


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("", "its signature is another"),
        ("word", "its signature is another"),
        (" {}", "its signature is another"),
        ("é {}", "its signature is another"),
        (announcements.signed(OTHER, "one", GIVEN, NOW_S), "its signature is another"),
        (announcements.signed(KEY, "one", GIVEN, NOW_S).replace('"number":3', '"number":4'), "its signature"),
        (announcements.signed(KEY, "three", GIVEN, NOW_S), "for another engine"),
        (announcements.signed(KEY, "one", replace(GIVEN, peer="another"), NOW_S), "that another engine has"),
        (announcements.signed(KEY, "one", GIVEN, NOW_S - 3600.0), "came too late"),
    ],
)
def test_anything_else_is_refused(word: str, sentence: str) -> None:
    with pytest.raises(BadRequestError, match=sentence):
        opened(word)


@pytest.mark.parametrize(
    "change",
    [
        {"number": "one"},
        {"places": 7},
        {"places": [[1]]},
        {"places": [["a", 1]]},
        {"until": None},
        {"formats": "{}"},
        {"lease": ...},
    ],
)
def test_what_a_member_signed_and_nobody_can_read_is_refused(change: dict[str, Any]) -> None:
    text = announcements.signed(KEY, "one", GIVEN, NOW_S).partition(" ")[2]
    given = {name: value for name, value in {**json.loads(text), **change}.items() if value is not ...}
    text = json.dumps(given)
    with pytest.raises(BadRequestError, match="cannot be read"):
        opened(f"{announcements._mac(KEY, text)} {text}")


@pytest.mark.parametrize("text", ["", "[]", "null", "7", "[" * 5000])
def test_a_signature_over_no_object_is_no_announcement(text: str) -> None:
    with pytest.raises(BadRequestError, match="cannot be read"):
        opened(f"{announcements._mac(KEY, text)} {text}")


def test_a_ticket_is_no_announcement() -> None:
    """One key signs both: what was signed as one is not the other."""
    text, mac = tickets.unread_params(KEY, "why")[tickets.TICKET].split(".")
    word = f"{base64.urlsafe_b64decode(mac).hex()} {base64.urlsafe_b64decode(text).decode()}"
    with pytest.raises(BadRequestError, match="its signature is another"):
        opened(word)
