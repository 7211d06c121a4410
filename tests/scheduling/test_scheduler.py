from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.errors import BadRequestError
from twostroke.core.sequence import FinishReason
from twostroke.core.step import StepResult


def test_an_idle_scheduler_has_nothing_to_launch() -> None:
    loop = Loop(layout((None, 4)))
    assert loop.scheduler.schedule(0.0) is None
    assert not loop.scheduler.has_work


def test_requests_join_and_leave_at_any_step() -> None:
    loop = Loop(layout((None, 40)))
    loop.add(request("a", range(3), max_tokens=8))
    loop.turn()
    loop.turn()
    loop.add(request("b", range(10, 13), max_tokens=2))
    loop.run()
    joined = next(step for step in loop.backend.steps if any(join.seq_id == 1 for join in step.joins))
    assert [slot.seq_id for slot in joined.decodes] == [0]
    left = next(step for step in loop.backend.steps if 1 in step.leaves)
    assert [slot.seq_id for slot in left.decodes] == [0]
    loop.check_outputs()


def test_a_request_id_is_used_by_one_unfinished_request_at_a_time() -> None:
    loop = Loop(layout((None, 40)))
    loop.add(request("a", range(3), max_tokens=2))
    with pytest.raises(BadRequestError, match="'a' is in use"):
        loop.add(request("a", range(3)))
    loop.run()
    loop.add(request("a", range(3), max_tokens=2))
    loop.run()


@pytest.mark.parametrize("num_launched", [0, 1, 2])
def test_an_abort_takes_effect_at_once_with_work_in_flight_too(num_launched: int) -> None:
    loop = Loop(layout((None, 40)), depth=1)
    other = loop.add(request("other", range(3), max_tokens=6))[0]
    aborted = loop.add(request("a", range(10, 19), max_tokens=9, n=2))
    for _ in range(num_launched):
        loop.launch()
    assert loop.scheduler.abort("a", now_s=42.0) == aborted
    assert loop.scheduler.abort("a") == []
    assert loop.scheduler.abort("never heard of") == []
    assert all(sequence.finish_reason is FinishReason.ABORT for sequence in aborted)
    assert all(sequence.timing.finished_s == 42.0 for sequence in aborted)
    loop.scheduler.check()
    assert sum(group.used for group in loop.scheduler.counts().blocks) == (1 if num_launched else 0)
    loop.run()
    assert all(not loop.records[sequence].tokens for sequence in aborted), "what was in flight is dropped"
    assert other.finish_reason is FinishReason.LENGTH
    loop.check_outputs()


def test_a_stop_string_found_by_the_engine_ends_a_sequence_with_work_in_flight() -> None:
    loop = Loop(layout((None, 40)), depth=1)
    sequence = loop.add(request("a", range(3), max_tokens=9))[0]
    loop.launch()
    loop.launch()
    loop.settle()
    assert loop.scheduler.finish(sequence, FinishReason.STOP)
    assert not loop.scheduler.finish(sequence, FinishReason.ABORT)
    assert loop.scheduler.has_work, "a step is still to be applied"
    assert loop.settle() == []
    assert (sequence.finish_reason, sequence.num_output) == (FinishReason.STOP, 1)
    loop.check_idle()


def test_a_row_is_closed_in_the_next_step_that_is_launched() -> None:
    loop = Loop(layout((None, 40)))
    loop.add(request("a", range(3), max_tokens=1))
    loop.run()
    assert set(loop.backend.rows) == {0}
    loop.add(request("b", range(3), max_tokens=1))
    loop.run()
    assert loop.backend.steps[-1].leaves == (0,)
    assert set(loop.backend.rows) == {1}


@pytest.mark.parametrize("depth", [0, 1])
def test_an_error_of_one_sequence_leaves_the_rest_alone(depth: int) -> None:
    loop = Loop(layout((None, 40)), depth=depth)
    bad = loop.add(request("bad", range(9), max_tokens=9))[0]
    good = loop.add(request("good", range(20, 29), max_tokens=9))[0]
    loop.turn()
    loop.backend.errors[bad.seq_id] = "the model produced logits that are not finite"
    loop.run()
    assert (bad.finish_reason, bad.error) == (FinishReason.ERROR, "the model produced logits that are not finite")
    assert good.finish_reason is FinishReason.LENGTH
    assert loop.records[bad].finished == 1
    loop.check_outputs()
    loop.backend.errors.clear()
    again = loop.add(request("again", range(9), max_tokens=2))[0]
    loop.run()
    assert again.timing.cached_tokens == 0, "KV that led to an error is not offered to others"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_ends_its_sequences_and_no_others(depth: int) -> None:
    loop = Loop(layout((None, 40)), depth=depth, max_running=1)
    first = loop.add(request("a", range(9), max_tokens=9))[0]
    second = loop.add(request("b", range(9), max_tokens=9))[0]
    loop.launch()
    if depth:
        loop.launch()
    step, _ = loop.in_flight.popleft()
    (advance,) = loop.scheduler.fail(step, "the device is gone", 5.0)
    assert advance.sequence is first and advance.finished
    assert (first.finish_reason, first.error) == (FinishReason.ERROR, "the device is gone")
    assert first.timing.finished_s == 5.0
    loop.run()
    assert second.finish_reason is FinishReason.LENGTH
    loop.check_outputs()


def test_a_missing_token_is_an_error_of_that_sequence() -> None:
    loop = Loop(layout((None, 40)))
    sequence = loop.add(request("a", range(3), max_tokens=9))[0]
    step = loop.launch()
    assert step is not None
    (advance,) = loop.scheduler.apply(step, StepResult(step.step_id, {}), 1.0)
    assert advance.finished and sequence.error == "the backend returned no token"


def test_results_are_applied_in_launch_order() -> None:
    loop = Loop(layout((None, 40)), depth=1)
    loop.add(request("a", range(3), max_tokens=9))
    first, second = loop.launch(), loop.launch()
    assert first is not None and second is not None
    with pytest.raises(ValueError, match="step 1 is not the oldest launched step"):
        loop.scheduler.apply(second, StepResult(1, {}), 1.0)
    with pytest.raises(ValueError, match="the result of step 1 was given for step 0"):
        loop.scheduler.apply(first, StepResult(1, {}), 1.0)


def test_counts_for_metrics() -> None:
    loop = Loop(layout((None, 20), (5, 12)), max_tokens_per_step=8, max_running=2)
    loop.add(request("a", range(2), max_tokens=9))
    loop.turn()
    loop.add(request("b", range(20, 40), max_tokens=2))
    loop.add(request("c", range(2), max_tokens=2))
    loop.launch()
    counts = loop.scheduler.counts()
    assert (counts.waiting, counts.running_prefill, counts.running_decode, counts.steps_in_flight) == (1, 1, 1, 1)
    assert [(group.free, group.cached, group.used) for group in counts.blocks] == [(17, 0, 3), (9, 0, 3)]
