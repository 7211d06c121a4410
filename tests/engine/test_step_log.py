"""Records of steps: sums run on, the ring is bounded, the step behind the longest gap is found."""

from __future__ import annotations

from twostroke.core.step import DecodeSlot, Drafted, PrefillChunk, SampledToken, Step, StepResult
from twostroke.core.timing import SequenceTiming
from twostroke.engine.step_log import StepLog

DECODE = Step(0, decodes=(DecodeSlot(0, 9), DecodeSlot(1, 19)))
MIXED = Step(1, prefills=(PrefillChunk(2, 0, (5, 6, 7), samples=True),), decodes=(DecodeSlot(0, 10),))


def took(compute_s: float) -> StepResult:
    return StepResult(0, {}, compute_s=compute_s)


def test_sums_between_two_steps() -> None:
    log = StepLog()
    first = log.add(DECODE, 0.0, 1.0, took(0.5))
    log.add(MIXED, 0.5, 3.0, took(1.5))
    last = log.add(DECODE, 3.5, 4.0, took(0.25))
    assert (first.began_s, log.records[1].began_s, last.began_s) == (0.0, 1.0, 3.5)
    assert (first.num_decodes, first.context_tokens) == (2, 30)
    between = last.totals.since(first.totals)
    assert (between.steps, between.compute_s, between.prefill_tokens) == (2, 1.75, 3)
    assert (between.decode_slots, between.context_tokens) == (3, 41)
    assert (between.decode_only_steps, between.decode_only_s) == (1, 0.25)
    assert (between.mixed_steps, between.mixed_s) == (1, 1.5)


def test_the_step_behind_the_longest_gap() -> None:
    log = StepLog()
    for done_s, step in ((1.0, DECODE), (2.0, DECODE), (5.0, MIXED), (6.0, DECODE)):
        log.add(step, 0.0, done_s, took(0.5))
    timing = SequenceTiming(token_times_s=[1.0, 2.0, 5.0, 6.0])
    log.close(timing)
    assert timing.step_after_gap is log.records[2] and timing.step_last is log.last


def test_the_ring_is_bounded_and_what_fell_out_is_not_found() -> None:
    log = StepLog(size=2)
    for number in range(10):
        log.add(DECODE, 0.0, float(number), took(0.5))
    assert len(log.records) == 2 and log.records[-1].totals.steps == 10
    timing = SequenceTiming(token_times_s=[1.0, 5.0, 6.0])
    log.close(timing)
    assert timing.step_after_gap is None


def test_drafts_are_summed_too() -> None:
    log = StepLog()
    first = log.add(DECODE, 0.0, 1.0, took(0.5))
    tokens = tuple(map(SampledToken, (5, 6, 7)))
    drafted = {0: Drafted("ngram", 4), 1: Drafted("ngram", 2)}
    last = log.add(DECODE, 1.0, 2.0, StepResult(1, {0: tokens, 1: tokens[:1]}, drafted=drafted))
    since = last.totals.since(first.totals)
    assert (since.drafts_computed, since.drafts_held, since.decode_tokens) == (6, 2, 4)
