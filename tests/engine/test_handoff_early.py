"""A prompt's KV that moves while the prompt is still being read: most of it is there when reading ends, tokens are
those of one engine alone, and nothing stays held of what nobody comes for, whatever goes wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.engine.test_handoff import KEY, LIMIT_S, everything_pays, play, read, request_of, settle
from tests.engine.test_tiers import CASES, CONTEXT, SHAPES, checkpoints, conversations

from twostroke.cluster.transfer import announcements
from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.handoff import Handoff, HandoffRecord
from twostroke.core.request import Request
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.kv.tiers import early
from twostroke.kv.tiers.peers import Peers
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind

assert checkpoints and SHAPES and everything_pays  # fixtures of theirs are ours, too
CHUNK = 32
Checkpoints = dict[tuple[str, WeightKind], Checkpoint]
Fleet = tuple[Engine, Engine, Engine]


def make_engine(
    checkpoint: Checkpoint, backend: str, kind: str, name: str, *names: str, block_size: int = 16
) -> Engine:
    """One that reads in short chunks."""
    config = EngineConfig(
        backend=backend,
        threads=1,
        max_context=CONTEXT,
        max_tokens_per_step=CHUNK,
        kv=KVConfig(kind=kind, block_size=block_size, memory_bytes=4_000_000, host_gb=0.004),
    )
    return assemble(checkpoint, None, config, FleetSettings(KEY, "sockets", engine_id=name, names=names)).engine


@contextmanager
def closed(*engines: Engine) -> Iterator[None]:
    try:
        yield
    finally:
        for engine in engines:
            engine.close()


@pytest.fixture
def pair(checkpoints: Checkpoints) -> Iterator[tuple[Engine, Engine]]:
    reader, writer = (
        make_engine(checkpoints["full", WeightKind.F32], "reference", "auto", name) for name in ("reader", "writer")
    )
    with closed(reader, writer):
        acquaint(reader, writer, request_of("first", 40, seed=99))
        yield reader, writer


def peers_of(engine: Engine) -> Peers:
    tiers = engine.scheduler.ledger.tiers
    assert tiers is not None and tiers.peers is not None
    return tiers.peers


def until(is_so: Callable[[], object], *engines: Engine) -> None:
    """While these look after what comes."""
    until_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < until_s
        for engine in engines:
            engine.scheduler.settle_tiers()
            engine.scheduler.check()
        time.sleep(0.001)


def acquaint(reader: Engine, writer: Engine, request: Request) -> None:
    """A writer listens to whom it has taken something from."""
    name = peers_of(writer).transport.described
    play(writer, requests=[(writer, replace(request, handoff=read(reader, request)))])
    settle(reader, writer)
    until(lambda: peers_of(reader).transport.who_listens(engine_id(name)))


def engine_id(contact: str) -> str:
    from twostroke.cluster.transfer.interface import Contact

    return Contact.read(contact).engine_id


def num_arrived(engine: Engine) -> int:
    """Blocks that are there before anybody asked for them."""
    return sum(len(part.kept) for part in peers_of(engine).early._parts() if part.fetching.arrived)


def begin(reader: Engine, request: Request, writer: str = "") -> str:
    lease_id = f"lease-{request.request_id}"
    sampling = replace(request.sampling, max_tokens=1, min_tokens=0)
    reader.add(replace(request, sampling=sampling, lease_id=lease_id, writer=writer))
    return lease_id


def read_early(reader: Engine, writer: Engine, request: Request, name: str = "") -> tuple[Handoff, int]:
    """Step by step, and after each until the writer has what it was told of. With the handoff how many blocks were
    there when the last step but one was over: before the reading ended."""
    lease_id, num_early, handoff = begin(reader, request, name), 0, None
    while reader.busy:
        before = num_arrived(writer)
        for event in reader.step():
            if isinstance(event, TokenEvent) and event.finish_reason is not None and event.sample_index == 0:
                handoff, num_early = event.handoff, before
        lease = peers_of(reader).lease(lease_id)
        told = None if lease is None else lease.told
        if told is not None and lease is not None:
            ends = [max(told.counts[group], told.first - lease.first[group]) for group in range(len(lease.kept))]
            num_told = sum(end - max(0, told.first - first) for end, first in zip(ends, lease.first, strict=True))
            until(lambda: num_arrived(writer) == num_told, writer)  # noqa: B023 - called at once
        reader.scheduler.check()
    assert handoff is not None
    return handoff, num_early


def read_a_part(reader: Engine, writer: Engine, request: Request) -> None:
    """As far as the writer has some of it."""
    lease_id = begin(reader, request)
    while (lease := peers_of(reader).lease(lease_id)) is None or lease.told is None:
        reader.step()
    until(lambda: num_arrived(writer), writer)


def written(writer: Engine, request: Request) -> tuple[dict[str, list[int]], HandoffRecord]:
    ended = play(writer, requests=[(writer, request)])
    timing = ended.last[f"{request.request_id}.0"].timing
    assert timing is not None and timing.handoff is not None
    return ended.tokens, timing.handoff


@pytest.mark.parametrize(("backend", "shape", "kind"), CASES, ids=" ".join)
def test_tokens_are_those_of_one_engine(checkpoints: Checkpoints, backend: str, shape: str, kind: str) -> None:
    checkpoint = checkpoints[shape, WeightKind.Q8_0 if backend == "cpu" else WeightKind.F32]
    reader, writer, alone = (make_engine(checkpoint, backend, kind, name) for name in ("reader", "writer", "alone"))
    with closed(reader, writer, alone):
        acquaint(reader, writer, request_of("first", 40, seed=99))
        early_bytes = num_bytes = 0
        for request in (*conversations(num=4, turns=2), request_of("long", 180)):
            handoff, _ = read_early(reader, writer, request)
            tokens, record = written(writer, replace(request, handoff=handoff))
            assert tokens == play(alone, requests=[(alone, request)]).tokens
            early_bytes, num_bytes = early_bytes + record.early_bytes, num_bytes + record.num_bytes
            settle(reader, writer)
            assert peers_of(writer).early.num_held == 0
        assert early_bytes == num_bytes > 0, "all of it was there, and none was asked for again"
        assert peers_of(writer).totals().early_bytes == early_bytes


def test_most_of_a_prompt_is_there_before_its_reading_ends(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    request = request_of("long", 180)
    handoff, num_early = read_early(reader, writer, request)
    num_blocks = len(handoff.slots[0])
    assert num_blocks == 11 and num_early == 10, "all but that of the last chunk"
    _, record = written(writer, replace(request, handoff=handoff))
    assert record.why_not is None and record.num_tokens == 176
    assert record.early_bytes == record.num_bytes == num_blocks * peers_of(writer).formats.groups[0].num_bytes
    settle(reader, writer)


def test_what_is_on_its_way_when_the_request_comes_is_waited_for(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was looked at meanwhile: all words are heard with the request, and no block is asked for twice."""
    reader, writer = pair
    request = request_of("long", 180)
    handoff = read(reader, request)
    assert handoff is not None
    fetched: list[int] = []
    fetch = peers_of(writer).transport.fetch

    def counted(peer: str, lease_id: str, remote: Any, local: Any, deadline_s: float) -> Any:
        fetched.append(len(remote))
        return fetch(peer, lease_id, remote, local, deadline_s)

    monkeypatch.setattr(peers_of(writer).transport, "fetch", counted)
    peers_of(writer).settle()
    _, record = written(writer, replace(request, handoff=handoff))
    assert sum(fetched) == 11 and record.num_tokens == 176 and record.why_not is None
    settle(reader, writer)


def test_only_whoever_will_write_is_told(checkpoints: Checkpoints) -> None:
    """By the name that a router gives it; of no name, whoever is the only one that listens."""
    checkpoint = checkpoints["full", WeightKind.F32]
    reader = make_engine(checkpoint, "reference", "auto", "reader")
    one = make_engine(checkpoint, "reference", "auto", "one", "10.0.0.8:8000", "one.example:80")
    two = make_engine(checkpoint, "reference", "auto", "two", "10.0.0.9:8000")
    with closed(reader, one, two):
        assert peers_of(reader).transport.who_listens("") is None
        acquaint(reader, one, request_of("a", 40, seed=1))
        assert peers_of(reader).transport.who_listens("") == "one"
        assert peers_of(reader).transport.who_listens("10.0.0.9:8000") is None
        acquaint(reader, two, request_of("b", 40, seed=2))
        assert peers_of(reader).transport.who_listens("") is None, "there are two"
        for name, listener in (("one.example:80", one), ("10.0.0.9:8000", two)):
            request = request_of(name, 180, seed=len(name))
            handoff, num_early = read_early(reader, listener, request, name)
            assert num_early == 10
            until(lambda: True, one, two)
            assert {peers_of(engine).early.num_held for engine in (one, two)} == {11, 0}
            assert written(listener, replace(request, handoff=handoff))[1].early_bytes > 0
            settle(reader, one, two)
        for name in ("10.0.0.7:8000", ""):
            request = request_of(f"nobody{name}", 180, seed=20 + len(name))
            lease_id = begin(reader, request, name)
            while reader.busy:
                reader.step()
                lease = peers_of(reader).lease(lease_id)
                assert lease is None or lease.told is None
            until(lambda: True, one, two)
            peers_of(reader).drop(lease_id)


def test_what_the_writer_was_sent_before_is_not_told_again(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    request = request_of("turn-1", 100, seed=5)
    handoff, _ = read_early(reader, writer, request, "writer")
    written(writer, replace(request, handoff=handoff))
    settle(reader, writer)
    drawn = random.Random(6)
    longer = (*request.prompt_token_ids, *(drawn.randrange(90) for _ in range(70)))
    again = replace(request, request_id="turn-2", prompt_token_ids=longer)
    handoff, _ = read_early(reader, writer, again, "writer")
    assert handoff.num_tokens == 160 and peers_of(writer).early.num_held == 4, "six of ten are there"
    _, record = written(writer, replace(again, handoff=handoff))
    assert record.early_bytes == record.num_bytes == 4 * peers_of(writer).formats.groups[0].num_bytes
    settle(reader, writer)


def test_what_the_writer_has_of_it_is_given_up(pair: tuple[Engine, Engine]) -> None:
    """Three blocks, in the midst of what was announced together."""
    reader, writer = pair
    request = request_of("long", 180)
    play(writer, requests=[(writer, replace(request_of("own", 1), prompt_token_ids=request.prompt_token_ids[:49]))])
    handoff, _ = read_early(reader, writer, request)
    own, a_block = peers_of(writer), peers_of(writer).formats.groups[0].num_bytes
    assert own.early.num_held == 11
    _, record = written(writer, replace(request, handoff=handoff))
    assert record.early_bytes == record.num_bytes == 8 * a_block
    settle(reader, writer)
    assert own.early.num_held == 0 and own.totals().unused_bytes == 3 * a_block


def test_what_nobody_comes_for_is_freed_in_its_time(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pair
    read_early(reader, writer, request_of("long", 180))
    own = peers_of(writer)
    assert own.early.num_held == 11 and own.is_busy and own.totals().early_blocks == 11
    passed_s, clock = early.EARLY_S - 5.0, own._clock
    monkeypatch.setattr(own, "_clock", lambda: clock() + passed_s)
    until(lambda: True, writer)
    assert own.early.num_held == 11
    passed_s = early.EARLY_S + 1.0
    until(lambda: not own.early.is_busy, writer)
    assert own.early.num_held == 0 and own.totals().unused_bytes == 11 * own.formats.groups[0].num_bytes
    host = writer.scheduler.ledger.tiers.host  # type: ignore[union-attr]
    host.clear()
    assert host.num_used(0) == 0
    # The request comes all the same, later than that: it fetches what it needs.
    request = request_of("late", 180, seed=3)
    handoff, _ = read_early(reader, writer, request)
    passed_s += early.EARLY_S + 1.0
    until(lambda: not own.early.is_busy, writer)
    _, record = written(writer, replace(request, handoff=handoff))
    assert record.why_not is None and record.early_bytes == 0 and record.num_tokens == 176


def test_a_prompt_that_ends_before_it_was_read_leaves_nothing(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pair
    read_a_part(reader, writer, request_of("gone", 180))
    transport: Any = peers_of(reader).transport
    offers = transport._transport._offers
    assert offers.known(["lease-gone"])
    reader.abort("gone")
    play(reader, requests=[])
    assert not offers.known(["lease-gone"]), "its slots are others' now, and nobody reads them"
    assert peers_of(reader).lease("lease-gone") is None and not peers_of(reader).is_busy
    own = peers_of(writer)
    clock = own._clock
    monkeypatch.setattr(own, "_clock", lambda: clock() + early.EARLY_S + 1.0)
    settle(reader, writer)
    assert own.early.num_held == 0
    request = request_of("gone", 180)
    assert written(writer, replace(request, handoff=read(reader, request)))[1].why_not is None
    settle(reader, writer)


def test_a_request_that_goes_away_frees_what_came(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    request = request_of("gone", 180)
    handoff, _ = read_early(reader, writer, request)
    writer.add(replace(request, handoff=handoff))
    writer.abort("gone")
    play(writer, requests=[])
    settle(reader, writer)
    assert peers_of(writer).early.num_held == 0


def test_an_owner_that_is_gone_midway_is_no_more_than_a_prompt_to_read(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = checkpoints["full", WeightKind.F32]
    reader, writer, alone = (
        make_engine(checkpoint, "reference", "auto", name) for name in ("reader", "writer", "alone")
    )
    with closed(reader, writer, alone):
        acquaint(reader, writer, request_of("first", 40, seed=99))
        request = request_of("long", 180)
        read_a_part(reader, writer, request)
        peers_of(reader).close()
        # Its router has nothing to pass on: the request comes without a handoff.
        ended = play(writer, requests=[(writer, request)])
        assert ended.tokens == play(alone, requests=[(alone, request)]).tokens
        timing = ended.last["long.0"].timing
        assert timing is not None and timing.cached_tokens == 0, "what came is found by nobody"
        own = peers_of(writer)
        clock = own._clock
        monkeypatch.setattr(own, "_clock", lambda: clock() + early.EARLY_S + 1.0)
        settle(writer)
        assert own.early.num_held == 0


def test_a_writer_without_room_takes_the_rest_with_its_request(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pair
    host = writer.scheduler.ledger.tiers.host  # type: ignore[union-attr]
    monkeypatch.setattr(early, "EARLY_SHARE", 5 / host.num_slots[0])
    request = request_of("long", 180)
    handoff = read(reader, request)
    assert handoff is not None
    until(lambda: num_arrived(writer) == 5, writer)
    _, record = written(writer, replace(request, handoff=handoff))
    a_block = peers_of(writer).formats.groups[0].num_bytes
    assert (record.why_not, record.early_bytes, record.num_bytes) == (None, 5 * a_block, 11 * a_block)
    settle(reader, writer)


def test_blocks_of_another_size_are_taken_with_the_request(checkpoints: Checkpoints) -> None:
    checkpoint = checkpoints["full", WeightKind.F32]
    reader = make_engine(checkpoint, "reference", "auto", "reader")
    writer = make_engine(checkpoint, "reference", "auto", "writer", block_size=32)
    with closed(reader, writer):
        acquaint(reader, writer, request_of("first", 70, seed=99))
        request = request_of("long", 180)
        handoff = read(reader, request)
        until(lambda: peers_of(writer).totals().unheard, writer)
        assert peers_of(writer).early.num_held == 0
        assert written(writer, replace(request, handoff=handoff))[1].early_bytes == 0
        settle(reader, writer)


def test_forged_and_repeated_announcements_are_refused(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    transport: Any = peers_of(reader).transport
    tell, words = transport._transport.tell, list[str]()
    transport._transport.tell = lambda name, word: words.append(word)
    request = request_of("long", 180)
    handoff = read(reader, request)
    assert len(words) > 2 and handoff is not None
    own = peers_of(writer)

    def refused(word: str) -> bool:
        before, held = own.totals().unheard, own.early.num_held
        tell("writer", word)
        until(lambda: own.totals().unheard > before, writer)
        return own.totals().unheard == before + 1 and own.early.num_held == held

    first = announcements.opened(bytes.fromhex(KEY), words[0], transport.described, ("writer",))
    elsewhere = transport.described.replace("127.0.0.1", "10.9.9.9")
    assert elsewhere != transport.described
    key, other_key = bytes.fromhex(KEY), b"o" * 32
    for word in (
        "",
        "nonsense",
        words[0][:-2] + "}",
        words[0].replace('"number":0', '"number":1'),
        announcements.signed(other_key, "writer", first),
        announcements.signed(key, "somebody", first),
        announcements.signed(key, "writer", replace(first, peer=elsewhere)),
        announcements.signed(key, "writer", first, now_s=time.time() - 3600.0),
        announcements.signed(key, "writer", replace(first, model="other")),
        announcements.signed(key, "writer", replace(first, places=((7, 0),))),
        announcements.signed(key, "writer", replace(first, places=((0, 1), (0, 1)))),
        words[1],  # out of its turn
    ):
        assert refused(word), word
    assert own.early.num_held == 0
    tell("writer", words[0])
    until(lambda: own.early.num_held, writer)
    assert refused(words[0]), "once is enough"
    tell("writer", words[1])
    until(lambda: num_arrived(writer) > len(first.places), writer)
    _, record = written(writer, replace(request, handoff=handoff))
    assert record.why_not is None and 0 < record.early_bytes < record.num_bytes
    settle(reader, writer)
    for word in words:
        assert refused(word), "its lease is over"
    assert not own.is_busy


def test_a_block_that_is_not_the_leases_is_not_given_out(pair: tuple[Engine, Engine]) -> None:
    """Whatever is announced, only what is on offer under the lease can be read."""
    reader, writer = pair
    transport: Any = peers_of(reader).transport
    request = request_of("kept", 100, seed=4)
    assert read(reader, request) is not None
    slots = peers_of(writer)._host.num_slots[0]
    word = announcements.signed(
        bytes.fromhex(KEY),
        "writer",
        announcements.Announcement(
            "lease-kept-2",
            transport.described,
            0,
            ((0, slots - 1),),
            peers_of(reader).model,
            peers_of(reader).formats,
        ),
    )
    transport._transport.tell("writer", word)
    own = peers_of(writer)
    until(lambda: own.early.num_held > 6, writer)
    until(lambda: own.early.num_held == 6, writer)
    assert num_arrived(writer) == 6
