from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.sequence import FinishReason, Sequence
from twostroke.scheduling.prefill import prefill_chunk


def test_a_long_prompt_is_read_in_chunks_and_its_last_chunk_samples() -> None:
    loop = Loop(layout((None, 20)), max_tokens_per_step=5)
    sequence = loop.add(request("a", range(12), max_tokens=1))[0]
    progress = []
    while loop.unfinished:
        progress += [advance.prefill_computed for advance in loop.turn()]
    chunks = [chunk for step in loop.backend.steps for chunk in step.prefills]
    assert [(chunk.start, chunk.end, chunk.samples) for chunk in chunks] == [
        (0, 5, False),
        (5, 10, False),
        (10, 12, True),
    ]
    assert progress == [5, 10, 12]
    assert sequence.timing.prefill_chunks == 3
    assert sequence.timing.prefill_compute_s == 0.75
    loop.check_outputs()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("fifo", [(0, 10, 14), (1, 0, 10), (2, 0, 2)]), ("slack", [(1, 0, 10), (0, 10, 14), (2, 0, 2)])],
)
def test_prompts_share_a_step_and_prefills_begun_come_first_unless_another_is_more_urgent(
    policy: str, expected: list[tuple[int, int, int]]
) -> None:
    loop = Loop(layout((None, 40)), max_tokens_per_step=16, max_chunk_tokens=10, policy=policy)
    loop.add(request("a", range(14), max_tokens=3))
    loop.turn()
    loop.add(request("b", range(20, 30), max_tokens=3, priority=-5))
    loop.add(request("c", range(40, 50), max_tokens=3))
    loop.turn()
    first, second = loop.backend.steps
    assert [(chunk.seq_id, chunk.start, chunk.end) for chunk in first.prefills] == [(0, 0, 10)]
    assert [(chunk.seq_id, chunk.start, chunk.end) for chunk in second.prefills] == expected
    loop.run()
    loop.check_outputs()


def test_a_prefix_hit_leaves_its_tail_to_compute() -> None:
    loop = Loop(layout((None, 40)))
    loop.add(request("a", range(12), max_tokens=1))
    loop.run()
    again = loop.add(request("b", range(12), max_tokens=1))[0]
    loop.run()
    (chunk,) = loop.backend.steps[-1].prefills
    assert (chunk.start, chunk.end) == (8, 12)
    assert again.timing.cached_tokens == 8
    counts = loop.scheduler.counts()
    assert (counts.prefix_hit_tokens, counts.prefix_lookup_tokens) == (8, 24)
    loop.check_outputs()


def test_a_second_turn_finds_the_answer_of_the_first() -> None:
    loop = Loop(layout((None, 40)))
    first = loop.add(request("a", range(6), max_tokens=8))[0]
    loop.run()
    second = loop.add(request("b", [*first.tokens, 1, 2], max_tokens=1))[0]
    loop.run()
    assert second.timing.cached_tokens == 12, "13 tokens were computed, 3 full blocks of 4"
    loop.check_outputs()


def test_chunks_shrink_to_the_room_that_a_window_leaves() -> None:
    loop = Loop(layout((6, 3)), max_tokens_per_step=50, depth=1)
    loop.add(request("a", range(30), max_tokens=20))
    loop.run()
    assert max(chunk.end - chunk.start for step in loop.backend.steps for chunk in step.prefills) == 12
    loop.check_outputs()


def test_the_samples_of_a_request_share_the_prompt_that_the_first_one_reads() -> None:
    for caching in (True, False):
        loop = Loop(layout((None, 40)), max_tokens_per_step=6, prefix_caching=caching)
        samples = loop.add(request("a", range(13), n=3, max_tokens=4))
        other = loop.add(request("b", range(13), max_tokens=4))[0]
        loop.run()
        assert [sample.timing.cached_tokens for sample in samples] == [0, 12, 12]
        assert other.timing.cached_tokens == (12 if caching else 0)
        assert len({tuple(sample.output_token_ids) for sample in samples}) == 3, "each sample draws for itself"
        loop.check_outputs()


def test_siblings_wait_for_the_prompt_even_when_a_step_has_room() -> None:
    loop = Loop(layout((None, 40)), max_tokens_per_step=100)
    samples = loop.add(request("a", range(13), n=3, max_tokens=4))
    loop.add(request("b", range(20, 33), max_tokens=4))
    step = loop.launch()
    assert step is not None
    assert [chunk.seq_id for chunk in step.prefills] == [0, 3], "others may pass the siblings"
    loop.settle()
    loop.run()
    assert [sample.timing.cached_tokens for sample in samples] == [0, 12, 12]


def test_siblings_go_on_when_the_first_sample_is_gone() -> None:
    loop = Loop(layout((None, 40)), max_tokens_per_step=6)
    first, second = loop.add(request("a", range(13), n=2, max_tokens=4))
    loop.turn()
    loop.scheduler.finish(first, FinishReason.ABORT)
    loop.run()
    assert second.timing.cached_tokens == 4
    loop.check_outputs()


def test_prompt_logprobs_are_asked_once_for_each_position_that_has_a_next_token() -> None:
    loop = Loop(layout((None, 40)), max_tokens_per_step=5)
    loop.add(request("a", range(11), prompt_logprobs=2, n=2, max_tokens=2))
    loop.run()
    loop.check_outputs()
    chunks = [chunk for step in loop.backend.steps for chunk in step.prefills]
    assert [(chunk.seq_id, chunk.prompt_logprobs, chunk.next_token_id) for chunk in chunks] == [
        (0, 2, 5),
        (0, 2, 10),
        (0, None, None),  # the last prompt token alone: no prompt token follows it
        (1, None, None),
    ]


def test_a_resumed_prompt_does_not_report_a_position_twice() -> None:
    sequence = Sequence(0, request("a", range(20), prompt_logprobs=1), 0, 40)
    sequence.high_water = 10  # preempted when positions below 10 were launched, and reported
    again = prefill_chunk(sequence, 4, 16)
    assert (again.start, again.end, again.prompt_logprobs, again.next_token_id) == (4, 10, None, None)
    onwards = prefill_chunk(sequence, 10, 20)
    assert (onwards.prompt_logprobs, onwards.next_token_id, onwards.samples) == (1, None, True)
    sequence.high_water = 20
    whole = prefill_chunk(sequence, 0, 20)
    assert (whole.end, whole.prompt_logprobs) == (20, None)
