"""An engine that is to read for another leaves prompts to it that are read there sooner: at once, with a word why, and
the other one's answer is that of one engine alone. It leaves no more than whoever writes has time for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.engine.test_handoff import CONTEXT, KEY, everything_pays, play, request_of, settle
from tests.engine.test_tiers import checkpoints

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import PromiseError
from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason
from twostroke.cost.floor import StepWork
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.forecast import exactly, nominal_seconds
from twostroke.scheduling.newcomers import SOONER_THERE, TOO_SHORT

assert checkpoints and everything_pays  # fixtures of theirs are ours, too


def seconds(work: StepWork) -> float:
    """Twenty tokens are read in the time of a step that writes: so many may be read beside a stream."""
    read = sum(num_tokens for _, num_tokens in work.chunks)
    return 0.1 * bool(work.contexts) + 0.005 * read


class Clock:
    """Of the engine that reads: what it sent before is long over unless a test says otherwise."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()


@pytest.fixture(autouse=True)
def much_later() -> None:
    CLOCK.now_s += 1e6


@pytest.fixture(scope="module")
def engines(checkpoints: dict[tuple[str, WeightKind], Checkpoint]) -> Iterator[list[Engine]]:
    """One that reads and leaves prompts, one that writes, one alone."""
    yield from made_engines(checkpoints, None)


@pytest.fixture(scope="module")
def lenient(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """One that reads, where gaps may be as long as it takes to read any prompt, and whoever comes late is refused."""
    levels = tmp_path_factory.mktemp("levels") / "levels.toml"
    levels.write_text("[levels.default]\nttft_ms = 800\nitl_ms = 60000\nwhen_late = 'refuse'\n")
    for engines in made_engines(checkpoints, str(levels)):
        yield engines[0]


def made_engines(checkpoints: dict[tuple[str, WeightKind], Checkpoint], levels: str | None) -> Iterator[list[Engine]]:
    config = EngineConfig(
        backend="reference",
        threads=1,
        max_context=CONTEXT,
        kv=KVConfig(block_size=16, memory_bytes=4_000_000, host_gb=0.004),
        service_levels=levels,
    )
    checkpoint, made = checkpoints["full", WeightKind.F32], []
    for name in ("reads", "writes", "alone"):
        fleet = FleetSettings(KEY, "sockets", engine_id=name, leaves_prompts=name == "reads")
        engine = assemble(checkpoint, None, config, fleet).engine
        scheduler = engine.scheduler
        scheduler._forecast.step_seconds, scheduler._forecast._step_error = seconds, exactly
        if scheduler._staying is not None:
            scheduler._staying._step_seconds = seconds
            engine._clock = CLOCK
        made.append(engine)
    assert [engine.scheduler._staying is None for engine in made] == [False, True, True]
    yield made
    for engine in made:
        engine.close()


def asked(name: str, length: int, seed: int, writer: str = "", n: int = 1) -> tuple[Request, Request]:
    """As it came, and as the engine that reads is asked."""
    request = request_of(name, length, seed)
    request = replace(request, sampling=replace(request.sampling, n=n))
    return request, replace(
        request, sampling=replace(request.sampling, max_tokens=1), lease_id=f"lease-{name}", writer=writer
    )


@pytest.mark.parametrize(
    ("length", "why"),
    [(3, TOO_SHORT), (16, TOO_SHORT), (17, SOONER_THERE), (20, SOONER_THERE), (21, None), (100, None)],
)
def test_short_prompts_are_left_to_whoever_writes(engines: list[Engine], length: int, why: str | None) -> None:
    reader, writer, alone = engines
    request, leg = asked(f"of-{length}", length, seed=length)
    steps = reader.step_log.last
    last = play(reader, requests=[(reader, leg)]).last[f"of-{length}.0"]
    handoff = last.handoff
    assert handoff is not None and handoff.unread == (why or "")
    if why is not None:
        assert last.finish_reason is FinishReason.LENGTH and last.token_ids == ()
        assert last.timing is not None and last.timing.is_left
        assert reader.step_log.last is steps, "nothing was computed"
    written = play(writer, requests=[(writer, replace(request, handoff=handoff))])
    assert written.tokens == play(alone, requests=[(alone, request)]).tokens
    record = written.last[f"of-{length}.0"].timing
    assert record is not None and record.handoff is not None and record.handoff.why_not == why
    settle(reader, writer)


def test_every_sample_is_left(engines: list[Engine]) -> None:
    reader, _, _ = engines
    _, leg = asked("three", 20, seed=300, n=3)
    last = play(reader, requests=[(reader, leg)]).last
    assert [last[f"three.{index}"].finish_reason for index in range(3)] == [FinishReason.LENGTH] * 3
    assert all(one.timing is not None and one.timing.is_left for one in last.values())
    assert not reader.busy
    reader.add(replace(leg))  # its name is free again
    play(reader, requests=[])


def test_what_the_writer_was_sent_before_counts_as_there(engines: list[Engine]) -> None:
    reader, writer, _ = engines
    first, leg = asked("first", 96, seed=400, writer="http://10.0.0.8:8000")
    handoff = play(reader, requests=[(reader, leg)]).last["first.0"].handoff
    assert handoff is not None and not handoff.unread
    play(writer, requests=[(writer, replace(first, handoff=handoff))])
    settle(reader, writer)
    longer = (*first.prompt_token_ids, 5, 6, 7, 8)
    totals = reader.scheduler.counts().tiers.handoffs  # type: ignore[union-attr]
    for name, who, is_left in (("there", "http://10.0.0.8:8000", True), ("else", "http://10.0.0.9:8000", False)):
        reader.clear_prefixes()  # else it has as little to read
        turn = replace(leg, request_id=name, lease_id=f"lease-{name}", prompt_token_ids=longer, writer=who)
        handoff = play(reader, requests=[(reader, turn)]).last[f"{name}.0"].handoff
        assert handoff is not None and (handoff.unread == SOONER_THERE) is is_left
        if not is_left:
            play(writer, requests=[(writer, replace(turn, lease_id="", handoff=handoff))])
            settle(reader, writer)
    assert reader.scheduler.counts().tiers.handoffs.left == totals.left + 1  # type: ignore[union-attr]


def test_where_nobody_knows_what_steps_cost_all_is_read(engines: list[Engine]) -> None:
    reader, writer, _ = engines
    forecast = reader.scheduler._forecast
    forecast.step_seconds = nominal_seconds
    try:
        request, leg = asked("nominal", 20, seed=500)
        handoff = play(reader, requests=[(reader, leg)]).last["nominal.0"].handoff
        assert handoff is not None and not handoff.unread
    finally:
        forecast.step_seconds = seconds
    play(writer, requests=[(writer, replace(request, handoff=handoff))])
    settle(reader, writer)


def decided(reader: Engine, name: str, length: int, seed: int, writer: str = "") -> str:
    """Why it is left; empty: it is handed over."""
    _, leg = asked(name, length, seed, writer)
    handoff = play(reader, requests=[(reader, leg)]).last[f"{name}.0"].handoff
    assert handoff is not None
    if not handoff.unread:
        drop(reader, leg)
    return handoff.unread


def drop(reader: Engine, leg: Request) -> None:
    """Nobody takes it."""
    tiers = reader.scheduler.ledger.tiers
    assert tiers is not None and tiers.peers is not None
    tiers.peers.drop(leg.lease_id)


def test_of_many_short_prompts_a_writer_is_left_what_it_has_time_for(engines: list[Engine]) -> None:
    """To read 17 tokens takes 85 ms, the last of them 5. Half of a writer's time may go to that: of 20 prompts a second
    that is about five, and the last tokens of the others."""
    reader = engines[0]
    left = 0
    for number in range(40):
        CLOCK.now_s += 0.05
        left += decided(reader, f"burst-{number}", 17, seed=600 + number) == SOONER_THERE
    assert 6 <= left <= 11
    CLOCK.now_s += 10.0
    assert decided(reader, "after", 20, seed=650) == SOONER_THERE


def test_what_one_writer_was_sent_says_nothing_of_another(engines: list[Engine]) -> None:
    reader = engines[0]
    found = [
        decided(reader, f"{writer}-{number}", 20, 700 + number, writer) == SOONER_THERE
        for number, writer in enumerate(("a", "a", "b", "b"))
    ]
    assert found == [True, False, True, False]


def test_what_is_handed_over_takes_a_writers_time_too(engines: list[Engine]) -> None:
    """Its last block has to be read there."""
    reader = engines[0]
    for number in range(10):
        assert not decided(reader, f"long-{number}", 96, seed=750 + number, writer="a")
    assert not decided(reader, "short", 20, seed=760, writer="a")
    assert decided(reader, "elsewhere", 20, seed=761, writer="b") == SOONER_THERE


@pytest.mark.parametrize("length", [21, 60, 150])
def test_a_promised_gap_of_any_length_leaves_no_long_prompt_where_nobody_knows_the_streams(
    lenient: Engine, length: int
) -> None:
    assert decided(lenient, f"lenient-{length}", 20, seed=800 + length) == SOONER_THERE
    CLOCK.now_s += 1e6
    assert not decided(lenient, f"long-{length}", length, seed=900 + length)


def test_who_is_left_is_not_refused_for_the_queue_of_who_does_not_read_it(lenient: Engine) -> None:
    """First tokens are promised within 800 ms here, and to read what waits takes 750."""
    _, waits = asked("waits", 150, seed=1000, writer="a")
    lenient.add(waits)
    CLOCK.now_s += 0.045  # else they are equals, of which the shorter goes first
    for length, why in ((16, TOO_SHORT), (20, SOONER_THERE)):
        _, leg = asked(f"short-{length}", length, seed=1010 + length, writer=f"b{length}")
        [sequence] = lenient.scheduler.add(replace(leg, arrival_s=CLOCK()))
        assert sequence.handoff is not None and sequence.handoff.unread == why
    _, leg = asked("late", 21, seed=1030)
    with pytest.raises(PromiseError):
        lenient.add(leg)
    play(lenient, requests=[])
    drop(lenient, waits)
