"""An engine that is to read for another leaves prompts to it that are read there sooner: at once, with a word why, and
the other one's answer is that of one engine alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.engine.test_handoff import CONTEXT, KEY, everything_pays, play, request_of, settle
from tests.engine.test_tiers import checkpoints

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.request import Request
from twostroke.core.sequence import FinishReason
from twostroke.cost.floor import StepWork
from twostroke.engine.build import assemble
from twostroke.engine.engine import Engine
from twostroke.engine.fleet import FleetSettings
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.forecast import nominal_seconds
from twostroke.scheduling.newcomers import SOONER_THERE, TOO_SHORT

assert checkpoints and everything_pays  # fixtures of theirs are ours, too


def seconds(work: StepWork) -> float:
    """Twenty tokens are read in the time of a step that writes: so many may be read beside a stream."""
    read = sum(num_tokens for _, num_tokens in work.chunks)
    return 0.1 * bool(work.contexts) + 0.005 * read


@pytest.fixture(scope="module")
def engines(checkpoints: dict[tuple[str, WeightKind], Checkpoint]) -> Iterator[list[Engine]]:
    """One that reads and leaves prompts, one that writes, one alone."""
    config = EngineConfig(
        backend="reference",
        threads=1,
        max_context=CONTEXT,
        kv=KVConfig(block_size=16, memory_bytes=4_000_000, host_gb=0.004),
    )
    checkpoint, made = checkpoints["full", WeightKind.F32], []
    for name in ("reads", "writes", "alone"):
        fleet = FleetSettings(KEY, "sockets", engine_id=name, leaves_prompts=name == "reads")
        engine = assemble(checkpoint, None, config, fleet).engine
        scheduler = engine.scheduler
        scheduler._forecast.step_seconds = seconds
        if scheduler._staying is not None:
            scheduler._staying._step_seconds = seconds
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
