"""A prompt read by one engine and answered by another: the tokens are those of one engine alone, on every backend and
kind of KV here; and nothing stays held, whatever goes wrong on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from tests.engine.test_tiers import CASES, CONTEXT, SHAPES, checkpoints, conversations
from tests.speculation.tiny import VOCAB_SIZE

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.events import TokenEvent
from twostroke.core.handoff import Handoff
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.kv.handing import NOT_KEPT
from twostroke.kv.tiers import peers
from twostroke.kv.tiers.worth import Worth
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind

assert checkpoints and SHAPES  # fixtures of theirs are ours, too
LIMIT_S = 120.0
KEY = "00" * 32


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models read faster than anything is moved."""
    monkeypatch.setattr(Worth, "loads", lambda *_: True)


def make_engine(checkpoint: Checkpoint, backend: str, kind: str, name: str, host_gb: float = 0.004) -> Engine:
    config = EngineConfig(
        backend=backend,
        threads=1,
        max_context=CONTEXT,
        kv=KVConfig(kind=kind, block_size=16, memory_bytes=4_000_000, host_gb=host_gb),
    )
    return assemble(checkpoint, None, config, FleetSettings(KEY, "sockets", engine_id=name)).engine


@dataclass
class Ended:
    tokens: dict[str, list[int]]
    last: dict[str, TokenEvent]


def play(*engines: Engine, requests: list[tuple[Engine, Request]]) -> Ended:
    """All at once, each by its engine, until all are over."""
    for engine, request in requests:
        engine.add(request)
    ended, until_s = Ended({}, {}), time.monotonic() + LIMIT_S
    while any(engine.busy for engine in engines):
        assert time.monotonic() < until_s
        for engine in engines:
            if engine.busy:
                for event in engine.step():
                    if isinstance(event, TokenEvent):
                        name = f"{event.request_id}.{event.sample_index}"
                        ended.tokens.setdefault(name, []).extend(event.token_ids)
                        if event.finish_reason is not None:
                            ended.last[name] = event
            engine.scheduler.settle_tiers()
            engine.scheduler.check()
    return ended


def settle(*engines: Engine) -> None:
    """Until neither leases nor fetches are left."""
    until_s = time.monotonic() + LIMIT_S
    while any(has_leases(engine) for engine in engines):
        assert time.monotonic() < until_s
        for engine in engines:
            engine.scheduler.settle_tiers()
            engine.scheduler.check()
        time.sleep(0.001)


def has_leases(engine: Engine) -> bool:
    tiers = engine.scheduler.ledger.tiers
    assert tiers is not None and tiers.peers is not None
    return tiers.peers.is_busy


def read(reader: Engine, request: Request) -> Handoff | None:
    """Read a prompt for another engine, as a router would have it."""
    sampling = replace(request.sampling, max_tokens=1, min_tokens=0)
    asked = replace(request, sampling=sampling, lease_id=f"lease-{request.request_id}")
    return play(reader, requests=[(reader, asked)]).last[f"{request.request_id}.0"].handoff


@pytest.fixture(scope="module", params=CASES, ids=lambda case: " ".join(case))
def fleet(
    request: pytest.FixtureRequest, checkpoints: dict[tuple[str, WeightKind], Checkpoint]
) -> Iterator[tuple[Engine, Engine, Engine]]:
    """One that reads, one that writes, and one alone."""
    backend, shape, kind = request.param
    checkpoint = checkpoints[shape, WeightKind.Q8_0 if backend == "cpu" else WeightKind.F32]
    engines = [make_engine(checkpoint, backend, kind, name) for name in ("reader", "writer", "alone")]
    yield engines[0], engines[1], engines[2]
    for engine in engines:
        engine.close()


def test_tokens_are_those_of_one_engine(fleet: tuple[Engine, Engine, Engine]) -> None:
    """Greedy and drawn, several samples, prefixes that one side or the other has already."""
    reader, writer, alone = fleet
    requests = conversations(num=4, turns=3)
    num_handed = 0
    for request in requests:
        handoff = read(reader, request)
        assert handoff is not None and handoff.num_tokens == (len(request.prompt_token_ids) - 1) // 16 * 16
        written = play(writer, requests=[(writer, replace(request, handoff=handoff))])
        expected = play(alone, requests=[(alone, request)])
        assert written.tokens == expected.tokens
        timing = written.last[f"{request.request_id}.0"].timing
        assert timing is not None
        record = timing.handoff
        assert record is not None and record.peer == "reader"
        assert timing.cached_tokens == handoff.num_tokens
        if record.why_not is None:
            assert record.num_tokens == handoff.num_tokens and timing.tier_tokens.peer > 0 and record.num_bytes > 0
        else:
            assert record.why_not == "all of it is cached here" and not timing.tier_tokens.peer
        num_handed += timing.tier_tokens.peer
        settle(reader, writer)
    # Later turns bring what is new: what the writer has of a conversation does not travel again.
    assert 0 < num_handed < sum((len(request.prompt_token_ids) - 1) // 16 * 16 for request in requests)


def test_many_at_once_while_others_run(fleet: tuple[Engine, Engine, Engine]) -> None:
    reader, writer, alone = fleet
    requests = [replace(request, request_id=f"m{request.request_id}") for request in conversations(num=5, turns=1)]
    handed = [replace(request, handoff=read(reader, request)) for request in requests]
    own = [request_of(f"own{number}", 30 + number, number) for number in range(3)]
    written = play(writer, requests=[(writer, request) for request in (*handed, *own)])
    expected = play(alone, requests=[(alone, request) for request in (*requests, *own)])
    assert written.tokens == expected.tokens
    settle(reader, writer)


def request_of(name: str, length: int, seed: int = 0, max_tokens: int = 6) -> Request:
    drawn = random.Random(seed)
    prompt = tuple(drawn.randrange(VOCAB_SIZE) for _ in range(length))
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


@pytest.fixture
def pair(checkpoints: dict[tuple[str, WeightKind], Checkpoint]) -> Iterator[tuple[Engine, Engine]]:
    engines = [make_engine(checkpoints["full", WeightKind.F32], "reference", "auto", name) for name in ("a", "b")]
    yield engines[0], engines[1]
    for engine in engines:
        engine.close()


def why_not(writer: Engine, request: Request) -> str | None:
    timing = play(writer, requests=[(writer, request)]).last[f"{request.request_id}.0"].timing
    assert timing is not None and timing.handoff is not None and len(timing.token_times_s) == 6
    if timing.handoff.why_not == "all of it is cached here":  # it had come before its request was aborted
        assert timing.cached_tokens > 0
        return None
    assert (timing.cached_tokens == 0) == (timing.handoff.why_not is not None)
    return timing.handoff.why_not


def test_what_does_not_fit_is_not_taken_and_the_prompt_is_read(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    request = request_of("one", 70)
    handoff = read(reader, request)
    assert handoff is not None and handoff.num_tokens == 64
    strange = [
        (replace(handoff, model="other"), "the other engine has another model, other weights or another version"),
        (replace(handoff, num_tokens=63), "63 tokens are no whole blocks of a prompt of 70"),
        (replace(handoff, num_tokens=80, slots=((1, 2, 3, 4, 5),)), "80 tokens are no whole blocks"),
        (replace(handoff, slots=(handoff.slots[0][1:],)), "it has not the blocks that these tokens take"),
        (replace(handoff, lease_id="another"), "lease"),
        (replace(handoff, slots=((996, 997, 998, 999),)), "lease"),
        (replace(handoff, slots=((1,) * 4,)), "it has not the blocks that these tokens take"),
    ]
    for number, (given, sentence) in enumerate(strange):
        asked = replace(request_of(f"x{number}", 70), cache_salt=str(number), handoff=given)
        assert sentence in (why_not(writer, asked) or "")
    settle(reader, writer)


def test_a_lease_that_nobody_takes_ends_in_its_time(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pair
    handoff = read(reader, request_of("one", 70))
    assert handoff is not None and has_leases(reader)
    own = reader.scheduler.ledger.tiers.peers  # type: ignore[union-attr]
    assert own is not None
    now_s = own._clock
    monkeypatch.setattr(own, "_clock", lambda: now_s() + peers.LEASE_S)
    settle(reader)
    why = why_not(writer, replace(request_of("two", 70), handoff=replace(handoff, lease_s=60.0)))
    assert why is not None and "lease" in why
    settle(reader, writer)


def test_an_owner_that_is_gone_is_no_more_than_a_prompt_to_read(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    handoff = read(reader, request_of("one", 70))
    reader.scheduler.ledger.tiers.peers.close()  # type: ignore[union-attr]
    assert why_not(writer, replace(request_of("two", 70), handoff=handoff)) is not None


def test_aborts_on_either_side_leave_nothing(pair: tuple[Engine, Engine]) -> None:
    reader, writer = pair
    asked = replace(request_of("gone", 150), lease_id="lease-gone")
    reader.add(asked)
    reader.step()
    reader.abort("gone")
    play(reader, requests=[])
    assert not has_leases(reader)
    handoff = read(reader, request_of("kept", 150))
    writer.add(replace(request_of("kept", 150), handoff=handoff))
    writer.abort("kept")
    play(writer, requests=[])
    settle(reader, writer)
    assert why_not(writer, replace(request_of("again", 150), handoff=read(reader, request_of("again", 150)))) is None
    settle(reader, writer)


def test_a_reader_without_room_hands_on_what_it_has(
    pair: tuple[Engine, Engine], checkpoints: dict[tuple[str, WeightKind], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pair
    alone = make_engine(checkpoints["full", WeightKind.F32], "reference", "auto", "alone")
    tiers = reader.scheduler.ledger.tiers
    assert tiers is not None
    monkeypatch.setattr(peers, "LEASED_SHARE", 4 / tiers.host.num_slots[0])
    request = request_of("long", 170)
    handoff = read(reader, request)
    assert handoff is not None and handoff.num_tokens == 64
    other = read(reader, request_of("other", 40, seed=9))
    assert other is not None and other.unread == NOT_KEPT and other.read_s > 0.0, "all that may be leased is"
    written = play(writer, requests=[(writer, replace(request, handoff=handoff))])
    assert written.tokens == play(alone, requests=[(alone, request)]).tokens
    timing = written.last["long.0"].timing
    assert timing is not None and timing.cached_tokens == timing.tier_tokens.peer == 64
    settle(reader, writer)
    alone.close()


def test_nobody_pins_all_that_may_be_leased(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases that nobody takes give way: after ten seconds to anybody, after two to a tenant that has fewer."""
    reader, _ = pair
    tiers = reader.scheduler.ledger.tiers
    assert tiers is not None and tiers.peers is not None
    own, passed_s = tiers.peers, 0.0
    monkeypatch.setattr(peers, "LEASED_SHARE", 8 / tiers.host.num_slots[0])
    clock = own._clock
    monkeypatch.setattr(own, "_clock", lambda: clock() + passed_s)

    def lease(name: str, seed: int, tenant: str) -> bool:
        handoff = read(reader, replace(request_of(name, 70, seed), tenant=tenant))
        assert handoff is not None
        return not handoff.unread

    assert lease("a1", 51, "a") and lease("a2", 52, "a"), "four blocks each: all that may be leased"
    assert not lease("b1", 53, "b"), "they may be taken at any moment"
    passed_s = 3.0
    assert not lease("a3", 54, "a"), "who has most gets no more of it"
    assert lease("b2", 55, "b")
    held = {one.lease_id for one in own._leases.values()}
    assert held == {"lease-a2", "lease-b2"}, "the oldest gave way"
    own._hear("alive", "lease-a2", own._clock())
    passed_s = 14.0
    assert lease("a4", 56, "a"), "b's has lasted; that of a is waited for"
    assert {one.lease_id for one in own._leases.values()} == {"lease-a2", "lease-a4"}
    assert own.totals().expired >= 2
    passed_s = 100.0
    settle(reader)


def test_a_lease_that_is_being_read_gives_way_to_nobody(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for bytes says so after five seconds for the first time; a slow transfer is not cut off before."""
    reader, _ = pair
    tiers = reader.scheduler.ledger.tiers
    assert tiers is not None and tiers.peers is not None
    own, passed_s = tiers.peers, 0.0
    monkeypatch.setattr(peers, "LEASED_SHARE", 4 / tiers.host.num_slots[0])
    clock = own._clock
    monkeypatch.setattr(own, "_clock", lambda: clock() + passed_s)

    def lease(name: str, seed: int, tenant: str) -> Handoff:
        handoff = read(reader, replace(request_of(name, 70, seed), tenant=tenant))
        assert handoff is not None
        return handoff

    handoff, passed_s = lease("a", 61, "a"), 3.0
    offers, cuts = own.transport._transport._offers, []  # type: ignore[attr-defined]
    size = handoff.formats.groups[0].num_bytes
    reading = offers.begin(handoff.lease_id, [(0, handoff.slots[0][0])], [size], lambda: cuts.append(True))
    assert lease("b", 62, "b").unread == NOT_KEPT
    passed_s = 14.0
    assert lease("c", 63, "b").unread == NOT_KEPT and not cuts
    assert offers.end(reading), "it stood all the while"
    assert not lease("d", 64, "b").unread and not own.transport.is_read(handoff.lease_id)
    passed_s = 100.0
    settle(reader)
