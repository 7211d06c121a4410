"""What another engine did of a request counts: its queue and its reading are part of the time to the first token, of
what was promised, and of the verdict."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.explain.stage import Ask, Stage, prompt
from twostroke.core.handoff import HandoffRecord
from twostroke.core.service_level import Promise
from twostroke.core.timing import SequenceTiming, TierTokens
from twostroke.explain.account import start_account
from twostroke.explain.facts import Yardstick
from twostroke.explain.timeline import Delivery, timeline
from twostroke.explain.verdict import Cause, Verdict

LEVEL = Promise("chat", 0.5, None)


@pytest.fixture(scope="module")
def stage(folder: Path) -> Stage:
    return Stage(folder)


@pytest.fixture(scope="module")
def written(stage: Stage) -> SequenceTiming:
    """The last tokens of a prompt are read here, and a short answer is written."""
    stage.play({"first": Ask(0.0, prompt(1, 400), 2)})
    timing = stage.play({"second": Ask(stage.paced.now_s, prompt(1, 410), 4)})["second"]
    assert timing.cached_tokens == 400
    return replace(timing, promise=LEVEL)


def handed(
    timing: SequenceTiming, queue_s: float, read_s: float, way_s: float = 0.0, why_not: str | None = None
) -> SequenceTiming:
    tokens = 0 if why_not else timing.cached_tokens
    record = HandoffRecord("reader-1", tokens, 1000 * tokens, 0.002, queue_s + read_s, queue_s, why_not)
    return replace(timing, elsewhere_s=queue_s + read_s + way_s, handoff=record, tier_tokens=TierTokens(peer=tokens))


def said(stage: Stage, timing: SequenceTiming) -> Verdict:
    start = start_account(timing, stage.facts, Yardstick(stage.facts, stage.cost))
    assert start is not None
    here_s = start.slots_s + start.blocks_s + start.prompts_s + start.beside_s + start.own_s + start.others_s
    there_s = start.queue_there_s + start.read_there_s + start.vain_s + start.handoff_s
    assert here_s + there_s == pytest.approx(start.whole_s)
    return stage.explain(timing).verdict


def test_alone_it_began_at_once_and_the_promise_was_kept(stage: Stage, written: SequenceTiming) -> None:
    verdict = said(stage, written)
    assert verdict.slow_to != "start" and verdict.promise is not None and "kept, it came in" in verdict.promise


def test_a_queue_at_the_reader_is_named_and_breaks_the_promise(stage: Stage, written: SequenceTiming) -> None:
    timing = handed(written, queue_s=5.0, read_s=0.04)
    assert timing.ttft_s == pytest.approx(5.04 + (written.ttft_s or 0.0)) and timing.kept_ttft is False
    verdict = said(stage, timing)
    assert verdict.slow_to == "start" and verdict.cause is Cause.QUEUE
    assert "before its first token went into the queue of reader-1, which read its prompt" in verdict.sentence
    assert "5.00 of the 5.0" in verdict.sentence and "held it up" not in verdict.sentence
    assert verdict.promise is not None
    assert "promises a first token in 500 ms, and it came in 5." in verdict.promise
    assert "5.00 s went into the queue of reader-1" in verdict.promise


def test_reading_there_is_reading(stage: Stage, written: SequenceTiming) -> None:
    verdict = said(stage, handed(written, queue_s=0.0, read_s=0.7))
    assert "of it went into reading 410 tokens, 400 of them on reader-1" in verdict.sentence
    assert verdict.promise is not None and "went into reading 400 tokens on reader-1" in verdict.promise
    assert verdict.start is not None and "went into reading 400 tokens on reader-1" in verdict.start.sentence


def test_the_least_it_could_take_is_that_of_both(stage: Stage, written: SequenceTiming) -> None:
    alone, slow, quick = (
        start_account(timing, stage.facts, Yardstick(stage.facts, stage.cost))
        for timing in (written, handed(written, 0.0, 9.0), handed(written, 0.0, 0.001))
    )
    assert alone is not None and slow is not None and quick is not None
    assert slow.floor_s > 2 * alone.floor_s
    assert quick.floor_s == pytest.approx(alone.floor_s + 0.001)  # most of it was cached there


def test_the_way_from_there_is_named(stage: Stage, written: SequenceTiming) -> None:
    verdict = said(stage, handed(written, queue_s=0.0, read_s=0.04, way_s=3.0))
    assert verdict.cause is Cause.HANDOFF
    assert "went into the handoff from reader-1 (the router, reception here, 0.4 MB of KV)" in verdict.sentence


def test_what_was_read_in_vain_is_said_so(stage: Stage, written: SequenceTiming) -> None:
    why = "its engine is gone"
    verdict = said(stage, handed(written, queue_s=0.1, read_s=2.0, why_not=why))
    assert verdict.cause is Cause.HANDOFF
    assert f"went into reading its prompt on reader-1, in vain: {why}" in verdict.sentence


def test_one_that_never_came_waited_from_the_beginning(stage: Stage) -> None:
    timing = SequenceTiming(
        arrival_s=10.0, elsewhere_s=4.0, finished_s=11.0, prompt_tokens=5, promise=Promise("chat", 0.5, None)
    )
    verdict = stage.explain(timing).verdict
    assert verdict.sentence == (
        "it ended before its first token, after 5.00 s (4.00 s of it at another engine), in the queue"
    )
    assert verdict.promise is not None and "none came in the 5.00 s until it ended" in verdict.promise


def test_the_timeline_has_both_machines_and_the_way(written: SequenceTiming) -> None:
    timing = handed(written, queue_s=1.0, read_s=0.5, way_s=0.25)
    delivery = Delivery(timing.arrival_s - 0.05, (timing.finished_s or 0.0) + 0.01)
    spans = timeline(timing, delivery)
    assert [span.kind for span in spans[:4]] == ["queue there", "prefill there", "way", "reception"]
    assert [span.seconds for span in spans[:4]] == pytest.approx([1.0, 0.5, 0.2, 0.05])
    assert spans[0].start_s == pytest.approx(-1.75)
    for before, after in pairwise(spans):
        assert after.start_s == pytest.approx(before.start_s + before.seconds)
