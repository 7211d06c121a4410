from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.errors import BadRequestError
from twostroke.core.sequence import FinishReason, SequenceState


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (16, None, "the prompt has 16 tokens, and max_context is 16 tokens"),
        (10, 7, "the prompt's 10 tokens and max_tokens 7 make 17 tokens, and max_context is 16"),
        pytest.param(10, 10**5000, "max_tokens an integer of thousands of digits", id="too long to write"),
    ],
)
def test_what_does_not_fit_the_context_is_refused(prompt_len: int, max_tokens: int | None, message: str) -> None:
    loop = Loop(layout((None, 20)), max_context=16)
    with pytest.raises(BadRequestError, match=message):
        loop.add(request("a", range(prompt_len), max_tokens=max_tokens))
    assert not loop.scheduler.has_work


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (9, None, "the prompt has 9 tokens, and the KV cache has room for 9 tokens"),
        (5, 5, "the prompt's 5 tokens and max_tokens 5 make 10 tokens, and the KV cache has room for 9"),
    ],
)
def test_what_does_not_fit_the_kv_cache_is_refused(prompt_len: int, max_tokens: int | None, message: str) -> None:
    loop = Loop(layout((None, 2), (2, 2)))
    with pytest.raises(BadRequestError, match=message):
        loop.add(request("a", range(prompt_len), max_tokens=max_tokens))


def test_without_max_tokens_an_answer_is_as_long_as_fits() -> None:
    by_pool = Loop(layout((None, 2)))
    sequence = by_pool.add(request("a", range(4)))[0]
    by_pool.run()
    assert len(sequence.tokens) == 9
    by_context = Loop(layout((None, 20)), max_context=11)
    sequence = by_context.add(request("a", range(4)))[0]
    by_context.run()
    assert len(sequence.tokens) == 11
    by_context.check_outputs()


def test_no_more_than_max_running_run_and_the_first_in_line_is_not_passed() -> None:
    loop = Loop(layout((None, 8)), max_running=2)
    loop.add(request("a", range(8), max_tokens=8))
    large = loop.add(request("large", range(24), max_tokens=2))[0]
    small = loop.add(request("small", range(2), max_tokens=2))[0]
    loop.turn()
    loop.turn()
    assert large.state is SequenceState.WAITING, "its prompt does not fit beside a"
    assert small.state is SequenceState.WAITING, "it may not pass"
    loop.run()
    assert large.timing.scheduled_s is not None and small.timing.scheduled_s is not None
    assert large.timing.scheduled_s <= small.timing.scheduled_s
    loop.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("blocks", [40, 9])
def test_a_state_is_taken_at_admission_and_is_nobody_elses(depth: int, blocks: int) -> None:
    """Two slots, six streams; with few blocks some are preempted, and their states are computed again."""
    loop = Loop(layout((None, blocks), (6, 40), states=2), depth=depth, max_running=6)
    added = [loop.add(request(str(number), range(10), max_tokens=12 + number))[0] for number in range(6)]
    most = 0
    while loop.unfinished:
        loop.turn()
        most = max(most, sum(one.state is SequenceState.RUNNING for one in added))
    assert most == 2 and (loop.scheduler.counts().preemptions > 0) == (blocks == 9)
    assert all(one.timing.cached_tokens == 0 for one in added), "what the state was behind a prefix is not kept"
    loop.check_outputs()


def test_admission_counts_what_running_prefills_still_have_to_take() -> None:
    loop = Loop(layout((None, 10)), max_tokens_per_step=6, max_chunk_tokens=3, kv_watermark=0.0)
    loop.add(request("a", range(24), max_tokens=2))
    late = loop.add(request("b", range(30, 50), max_tokens=2))[0]
    loop.turn()
    assert late.state is SequenceState.WAITING, "7 of 10 blocks are promised to a"
    loop.run()
    assert loop.scheduler.counts().preemptions == 0
    loop.check_outputs()


def test_the_watermark_leaves_room_for_running_streams() -> None:
    for watermark, expected in ((0.0, SequenceState.RUNNING), (0.3, SequenceState.WAITING)):
        loop = Loop(layout((None, 10)), kv_watermark=watermark)
        loop.add(request("a", range(16), max_tokens=4))
        second = loop.add(request("b", range(30, 47), max_tokens=1))[0]
        loop.launch()
        assert second.state is expected
        loop.run()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_youngest_is_preempted_and_resumes_from_the_prefix_index(depth: int) -> None:
    loop = Loop(layout((None, 10)), depth=depth, kv_watermark=0.0)
    elder = loop.add(request("elder", range(15), max_tokens=12, arrival_s=0.0))[0]
    younger = loop.add(request("younger", range(20, 35), max_tokens=12, arrival_s=1.0))[0]
    loop.run()
    assert elder.timing.preemptions == 0
    assert younger.timing.preemptions == 1
    assert loop.scheduler.counts().preemptions == 1
    (resumption,) = (join for step in loop.backend.steps for join in step.joins if join.output_token_ids)
    assert resumption.seq_id == younger.seq_id
    assert list(resumption.output_token_ids) == younger.output_token_ids[: len(resumption.output_token_ids)]
    # Its blocks stayed findable but for what the elder took: less than all was computed again.
    known = younger.prompt_len + len(resumption.output_token_ids)
    assert 0 < younger.timing.recomputed_tokens < known - 1
    loop.check_outputs()


def test_priority_decides_who_is_preempted() -> None:
    loop = Loop(layout((None, 10)), kv_watermark=0.0)
    first = loop.add(request("first", range(15), max_tokens=12, priority=1))[0]
    urgent = loop.add(request("urgent", range(20, 35), max_tokens=12, priority=0))[0]
    loop.run()
    assert first.timing.preemptions == 1
    assert urgent.timing.preemptions == 0
    loop.check_outputs()


def test_a_preempted_sequence_keeps_the_token_in_flight_and_waits_for_it() -> None:
    loop = Loop(layout((None, 8)), depth=1, kv_watermark=0.0)
    elder = loop.add(request("elder", range(11), max_tokens=10))[0]
    younger = loop.add(request("younger", range(20, 31), max_tokens=10))[0]
    loop.launch()
    while loop.launch() and younger.timing.preemptions == 0:
        loop.settle()
    assert younger.state is SequenceState.WAITING and younger.num_in_flight == 1
    before = len(younger.tokens)
    loop.scheduler.finish(elder, FinishReason.ABORT)  # all the room there is, and still it must wait
    loop.launch()
    assert younger.state is SequenceState.WAITING
    while loop.in_flight:
        loop.settle()
    assert len(younger.tokens) == before + 1 and younger.num_in_flight == 0
    loop.launch()
    assert younger.state is SequenceState.RUNNING
    loop.run()
    loop.check_outputs()


def test_a_preempted_sequence_may_finish_with_the_token_in_flight() -> None:
    loop = Loop(layout((None, 8)), kv_watermark=0.0)
    loop.add(request("elder", range(15), max_tokens=10))
    younger = loop.add(request("younger", range(20, 35), max_tokens=2))[0]
    loop.turn()
    loop.launch()  # younger's second and last token is in flight
    assert younger.num_in_flight == 1
    loop.launch()
    assert younger.timing.preemptions == 1, "the elder took its blocks meanwhile"
    loop.settle()
    assert younger.finish_reason is FinishReason.LENGTH
    loop.run()
    loop.check_outputs()


def test_nobody_is_admitted_into_the_blocks_of_one_just_preempted() -> None:
    """It waits for its token in flight, so the next in line could pass it, and would be in its way."""
    loop = Loop(layout((None, 8)), depth=1, kv_watermark=0.0, max_running=2)
    loop.add(request("elder", range(11), max_tokens=10))
    younger = loop.add(request("younger", range(20, 31), max_tokens=10))[0]
    next_in_line = loop.add(request("next", range(3), max_tokens=2))[0]
    loop.launch()
    while loop.launch() and younger.timing.preemptions == 0:
        loop.settle()
    assert next_in_line.state is SequenceState.WAITING
    loop.run()
    loop.check_outputs()


def test_a_prompt_preempted_with_a_chunk_in_flight_reports_each_position_once() -> None:
    loop = Loop(layout((None, 8)), kv_watermark=0.0, max_chunk_tokens=8)
    loop.add(request("elder", range(8), max_tokens=9))
    younger = loop.add(request("younger", range(30, 53), max_tokens=2, prompt_logprobs=0))[0]
    loop.turn()
    loop.turn()
    while younger.timing.preemptions == 0:  # run ahead, to where the elder needs a block of the younger
        assert loop.launch() is not None
    assert younger.num_computed + younger.num_in_flight > 0
    loop.run()
    assert younger.timing.recomputed_tokens > 0
    loop.check_outputs()
