"""Two engines, and what is said of a request that one read and the other answered: its time begins where it first came
in, whoever held it up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.test_handoff import CONTEXT, KEY, everything_pays, play, request_of, settle
from tests.engine.test_tiers import checkpoints

from twostroke.config import EngineConfig, KVConfig
from twostroke.core.errors import PromiseError
from twostroke.core.timing import SequenceTiming
from twostroke.engine.build import Assembly, assemble
from twostroke.engine.explaining import engine_facts
from twostroke.engine.fleet import FleetSettings
from twostroke.explain.explanation import Explainer
from twostroke.explain.handoff import handoff_sentence
from twostroke.kv.handing import NOT_KEPT
from twostroke.kv.tiers import peers
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.scheduling.forecast import exactly

assert checkpoints and everything_pays  # fixtures of theirs are ours, too
HELD_S = 1.5
LEVELS = "[levels.chat]\nttft_ms = 1000\nitl_ms = 60000\n\n[levels.strict]\nttft_ms = 1000\nwhen_late = 'refuse'\n"


@pytest.fixture(scope="module")
def pair(
    checkpoints: dict[tuple[str, WeightKind], Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Assembly, Assembly]]:
    """One that reads, and one that writes."""
    levels = tmp_path_factory.mktemp("levels") / "levels.toml"
    Path(levels).write_text(LEVELS)
    config = EngineConfig(
        backend="reference",
        threads=1,
        max_context=CONTEXT,
        kv=KVConfig(block_size=16, memory_bytes=4_000_000, host_gb=0.004),
        service_levels=str(levels),
    )
    checkpoint = checkpoints["full", WeightKind.F32]
    both = [assemble(checkpoint, None, config, FleetSettings(KEY, "sockets", engine_id=n)) for n in ("reads", "writes")]
    yield both[0], both[1]
    for one in both:
        one.engine.close()


def handed(pair: tuple[Assembly, Assembly], name: str, held_s: float, seed: int, level: str = "chat") -> SequenceTiming:
    """A prompt that waits so long for the engine that reads it."""
    reader, writer = (one.engine for one in pair)
    request = replace(request_of(name, 100, seed=seed, max_tokens=4), service_level=level)
    asked = replace(request, sampling=replace(request.sampling, max_tokens=1), lease_id=f"lease-{name}")
    reader.add(asked)
    time.sleep(held_s)
    handoff = play(reader, requests=[]).last[f"{name}.0"].handoff
    assert handoff is not None and handoff.queue_s >= held_s
    timing = play(writer, requests=[(writer, replace(request, handoff=handoff))]).last[f"{name}.0"].timing
    settle(reader, writer)
    assert timing is not None and timing.handoff is not None and timing.handoff.why_not is None
    return timing


def test_who_waited_where_it_was_read_was_held_up(pair: tuple[Assembly, Assembly]) -> None:
    timing = handed(pair, "late", HELD_S, 1)
    assert timing.ttft_s is not None and timing.ttft_s > HELD_S and timing.kept_ttft is False
    assert timing.total_s is not None and timing.total_s > timing.ttft_s
    facts = engine_facts(pair[1])
    explanation = Explainer(lambda: facts, lambda: None).explain(timing)
    verdict = explanation.verdict
    assert verdict.slow_to == "start"
    assert "went into the queue of reads, which read its prompt" in verdict.sentence, verdict.sentence
    assert verdict.promise is not None
    assert "promises a first token in 1.00 s, and it came in 1." in verdict.promise, verdict.promise
    assert "went into the queue of reads, which read its prompt" in verdict.promise
    assert explanation.spans[0].kind == "queue there" and explanation.spans[0].seconds >= HELD_S


def test_who_did_not_wait_was_not(pair: tuple[Assembly, Assembly]) -> None:
    timing = handed(pair, "soon", 0.0, 2)
    assert timing.kept_ttft is True and timing.elsewhere_s < 1.0


def test_the_time_of_an_engine_without_room_is_not_the_ways(
    pair: tuple[Assembly, Assembly], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the prompt, in vain: nothing may be leased. Who held the request up is said all the same."""
    reader, writer = (one.engine for one in pair)
    monkeypatch.setattr(peers, "LEASED_SHARE", 0.0)
    request = replace(request_of("vain", 100, seed=7, max_tokens=4), service_level="chat")
    reader.add(replace(request, sampling=replace(request.sampling, max_tokens=1), lease_id="lease-vain"))
    time.sleep(HELD_S)
    handoff = play(reader, requests=[]).last["vain.0"].handoff
    assert handoff is not None and handoff.unread == NOT_KEPT
    timing = play(writer, requests=[(writer, replace(request, handoff=handoff))]).last["vain.0"].timing
    assert timing is not None and timing.handoff is not None
    assert timing.handoff.read_s == handoff.read_s > timing.handoff.queue_s >= HELD_S
    assert " at another engine" in handoff_sentence(timing.handoff)
    facts = engine_facts(pair[1])
    explanation = Explainer(lambda: facts, lambda: None).explain(timing)
    assert explanation.spans[0].kind == "queue there" and explanation.spans[0].seconds >= HELD_S
    assert "went into the queue of another engine" in explanation.verdict.sentence


def test_what_is_read_already_is_not_refused_for_the_time_that_reading_takes(pair: tuple[Assembly, Assembly]) -> None:
    """As if this engine read a token in a tenth of a second: alone it refuses the prompt, handed over it does not."""
    _, writer = (one.engine for one in pair)
    forecast = writer.scheduler._forecast
    forecast.step_seconds, forecast._step_error = lambda work: 0.1 * work.num_tokens, exactly
    with pytest.raises(PromiseError, match="reading this prompt alone takes"):
        writer.add(replace(request_of("alone", 100, seed=91), service_level="strict"))
    timing = handed(pair, "read", 0.0, 3, "strict")
    assert timing.promise is not None and timing.promise.ttft_s == 1.0
    assert not writer.busy
    writer.scheduler.check()


def test_whose_first_token_is_there_is_not_refused_for_being_late(pair: tuple[Assembly, Assembly]) -> None:
    """Nothing that is left to do makes that token later. Without it, the request is refused."""
    reader, writer = (one.engine for one in pair)
    forecast = writer.scheduler._forecast
    forecast.step_seconds, forecast._step_error = lambda work: 0.1 * work.num_tokens, exactly
    request = replace(request_of("gone by", 100, seed=4, max_tokens=4), service_level="strict")
    asked = replace(request, sampling=replace(request.sampling, max_tokens=1), lease_id="lease-gone")
    handoff = play(reader, requests=[(reader, asked)]).last["gone by.0"].handoff
    assert handoff is not None
    late = replace(handoff, way_s=2.0)
    with pytest.raises(PromiseError, match="went by at another engine"):
        writer.add(replace(request, handoff=replace(late, first=None)))
    timing = play(writer, requests=[(writer, replace(request, handoff=late))]).last["gone by.0"].timing
    assert timing is not None and timing.kept_ttft is False and len(timing.token_times_s) == 4
    settle(reader, writer)
