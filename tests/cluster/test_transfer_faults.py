"""Owners and readers that are killed, stopped, cancelled or closed while KV is on its way: an error in time, and
nothing lands afterwards in slots that were called free."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.cluster.transfers import (
    FAR_WAYS,
    LARGE,
    LIMIT_S,
    SOON_S,
    WAYS,
    Engine,
    Start,
    fetched,
    serves_still,
    wait_for,
)


@pytest.mark.parametrize("way", WAYS)
def test_an_owner_that_was_killed_is_an_error_and_its_successor_is_read(start: Start, way: str) -> None:
    owner, reader = start(way, "owner"), start(way, "reader")
    owner.do("fill", seed=1)
    owner.do("offer", lease="a", places=owner.places(0))
    assert fetched(reader, owner, "a", [(0, 0)], [(0, 0)])["arrived"]
    port = owner.port
    owner.signal(signal.SIGKILL)
    state = fetched(reader, owner, "a", [(0, 1)], [(0, 1)])
    assert not state["arrived"] and state["is_over"] and state["took_s"] < SOON_S
    reader.do("beat", peer=owner.contact, leases=["a"])  # to nobody
    second = start(way, "owner", port=port)
    second.do("fill", seed=2)
    second.do("offer", lease="b", places=second.places(0))
    assert second.contact == owner.contact
    assert fetched(reader, second, "b", [(0, 1)], [(0, 2)])["arrived"]
    assert reader.do("digests", places=[(0, 2)]) == second.expected(2, [(0, 1)])


def interrupted(start: Start, way: str, sign: int, seconds: float) -> tuple[Engine, Engine, int, list]:
    """An owner that got a signal while its bytes were on their way."""
    sizes, counts = LARGE
    reader = start(way, "reader", sizes=sizes, counts=counts)
    for _ in range(6):
        owner = start(way, "owner", sizes=sizes, counts=counts)
        owner.do("scribble", places=owner.places(), byte=9)
        reader.do("scribble", places=reader.places(), byte=0)
        owner.do("offer", lease="a", places=owner.places())
        given = {"peer": owner.contact, "lease": "a", "remote": owner.places(), "local": reader.places()}
        number, was_on_its_way = reader.do("interrupt", **given, seconds=seconds, pid=owner.process.pid, sign=sign)
        if was_on_its_way:
            return owner, reader, number, owner.places()
        owner.end()
    pytest.fail("every transfer was over before its owner could be reached")


@pytest.mark.parametrize("way", ["sockets", WAYS[2]])
def test_an_owner_that_dies_in_the_middle_leaves_an_error(start: Start, way: str) -> None:
    owner, reader, number, places = interrupted(start, way, signal.SIGKILL, LIMIT_S)
    state = reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)
    assert state["is_over"] and not state["arrived"] and state["error"] and state["took_s"] < SOON_S
    nothing_lands(reader, places, start(way, "owner", sizes=owner.sizes, counts=owner.counts))


@pytest.mark.parametrize("way", FAR_WAYS)
def test_an_owner_that_is_stopped_is_late_and_lands_nothing_afterwards(start: Start, way: str) -> None:
    owner, reader, number, places = interrupted(start, way, signal.SIGSTOP, 1.0)
    state = reader.do("until", number=number, what="is_settled", limit_s=LIMIT_S)
    assert state["is_settled"] and not state["arrived"] and "deadline" in state["error"]
    assert state["took_s"] < SOON_S
    other = start(way, "other", sizes=owner.sizes, counts=owner.counts)
    serves_still(other, reader)  # one peer's trouble is its own
    state = reader.do("until", number=number, what="is_over", limit_s=LIMIT_S if way == "sockets" else 1.0)
    if way == "sockets":
        assert state["is_over"]  # its connection was closed here
        nothing_lands(reader, places, other, meanwhile=lambda: owner.signal(signal.SIGCONT))
    else:
        assert not state["is_over"]  # NIXL would still fill the slots, as they are asked for
        owner.signal(signal.SIGCONT)
        assert reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)["is_over"]
        nothing_lands(reader, places, other)
    assert not reader.do("state", number=number)["arrived"]
    assert owner.do("withdraw", lease="a") is True
    serves_still(owner, reader)


@pytest.mark.slow
@pytest.mark.parametrize("way", FAR_WAYS)
def test_a_stopped_owner_that_is_killed_leaves_the_slots_free(start: Start, way: str) -> None:
    owner, reader, number, places = interrupted(start, way, signal.SIGSTOP, 0.5)
    reader.do("until", number=number, what="is_settled", limit_s=LIMIT_S)
    owner.signal(signal.SIGKILL)
    state = reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)
    assert state["is_over"] and not state["arrived"]
    nothing_lands(reader, places, start(way, "owner", sizes=owner.sizes, counts=owner.counts))


def nothing_lands(reader: Engine, places: list, other: Engine, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Into slots that were called free, but what is fetched anew: into the second. While it fetches, the reader takes
    in whatever comes; NIXL takes in nothing otherwise."""
    reader.do("scribble", places=places, byte=5)
    free = [place for place in places if place != (0, 1)]
    meanwhile()
    until_s = time.monotonic() + 0.5
    while time.monotonic() < until_s:
        serves_still(other, reader)
    assert reader.do("holds", places=free, byte=5)


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_owner_that_was_never_met_is_late_too(start: Start, way: str) -> None:
    owner, reader = start(way, "owner"), start(way, "reader")
    owner.do("offer", lease="a", places=[(0, 0)])
    reader.contact  # noqa: B018 - it has started
    owner.signal(signal.SIGSTOP)
    state = fetched(reader, owner, "a", [(0, 0)], [(0, 0)], seconds=0.3)
    assert state["is_over"] and not state["arrived"] and state["took_s"] < SOON_S
    owner.signal(signal.SIGCONT)
    serves_still(owner, reader)


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "running"])
@pytest.mark.parametrize("way", FAR_WAYS)
def test_an_owner_takes_its_slots_back_from_whoever_reads(start: Start, way: str, is_stopped: bool) -> None:
    """It writes other things there at once. A reader that was not done is never told that it has the whole."""
    sizes, counts = LARGE
    owner, reader = (start(way, name, sizes=sizes, counts=counts) for name in ("owner", "reader"))
    for attempt in range(8):
        owner.do("scribble", places=owner.places(), byte=9)
        reader.do("scribble", places=reader.places(), byte=0)
        owner.do("offer", lease=f"a{attempt}", places=owner.places())
        given = {"lease": f"a{attempt}", "remote": owner.places(), "local": reader.places(), "seconds": LIMIT_S}
        sign = signal.SIGSTOP if is_stopped else 0
        reader.begin("interrupt", peer=owner.contact, pid=reader.process.pid, sign=sign, **given)
        if is_stopped:
            wait_for(reader.is_stopped)
            assert owner.do("withdraw", lease=f"a{attempt}") is True
            owner.do("scribble", places=owner.places(), byte=1)
            reader.signal(signal.SIGCONT)
            number, was_on_its_way = reader.heard()
        else:
            number, was_on_its_way = reader.heard()
            assert owner.do("withdraw", lease=f"a{attempt}") is True
            owner.do("scribble", places=owner.places(), byte=1)
        state = reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)
        assert state["is_over"]
        if state["arrived"]:
            assert reader.do("holds", places=reader.places(), byte=9)
        elif was_on_its_way:
            break
    else:
        pytest.fail("every transfer was over before its offer was")
    serves_still(owner, reader)


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("way", WAYS)
def test_a_fetch_that_is_ended_here_lands_nothing_afterwards(start: Start, way: str, how: str) -> None:
    sizes, counts = LARGE
    owner, reader = (start(way, name, sizes=sizes, counts=counts) for name in ("owner", "reader"))
    owner.do("offer", lease="a", places=owner.places())
    given = {
        "peer": owner.contact,
        "lease": "a",
        "remote": owner.places(),
        "local": reader.places(),
        "seconds": LIMIT_S,
    }
    number = reader.do("fetch", **given)
    if how == "cancel":
        reader.do("cancel", number=number)
        state = reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)
        assert state["is_over"] and (state["arrived"] or "cancelled" in state["error"])
        nothing_lands(reader, reader.places(), owner)
        return
    assert reader.do("close") < SOON_S
    state = reader.do("state", number=number)
    assert state["is_over"] and (state["arrived"] or "closed" in state["error"])
    assert "closed" in reader.do("state", number=reader.do("fetch", **given))["error"]
    reader.do("scribble", places=reader.places(), byte=5)
    time.sleep(0.3)
    assert reader.do("holds", places=reader.places(), byte=5)


@pytest.mark.parametrize("way", WAYS)
def test_an_owner_that_closes_ends_its_readers(start: Start, way: str) -> None:
    sizes, counts = LARGE
    owner, reader = (start(way, name, sizes=sizes, counts=counts) for name in ("owner", "reader"))
    owner.do("offer", lease="a", places=owner.places())
    given = {
        "peer": owner.contact,
        "lease": "a",
        "remote": owner.places(),
        "local": reader.places(),
        "seconds": LIMIT_S,
    }
    number = reader.do("fetch", **given)
    assert owner.do("close") < SOON_S
    assert reader.do("until", number=number, what="is_over", limit_s=LIMIT_S)["is_over"]
    assert not fetched(reader, owner, "a", owner.places(), reader.places())["arrived"]
