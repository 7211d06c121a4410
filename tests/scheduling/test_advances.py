"""Slots with drafts: what a range in flight means for positions, blocks and limits, and that an answer is the one that
comes a token at a time, wherever in an advance it ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.scheduling.fake_backend import FakeTicket, expected_output
from tests.scheduling.loop import VOCAB_SIZE, Loop, layout, request
from twostroke.core.sequence import FinishReason, Sequence, SequenceState
from twostroke.core.step import Drafts, SampledToken, Step
from twostroke.scheduling.advance import TOO_MANY_TOKENS
from twostroke.scheduling.plan import Drafting


class Always(Drafting):
    """As many drafts as this wherever they fit."""

    def __init__(self, most: int) -> None:
        self.most = most

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        return Drafts(min(self.most, most))


class Guesses(Drafting):
    """The host's own, from the tokens it knows: right ones, however late they come."""

    def __init__(self, most: int) -> None:
        self.most = most

    def drafts(self, sequence: Sequence, most: int) -> Drafts | None:
        known = sequence.num_output
        answer = expected_output(sequence.request, 0, len(sequence.tokens) + 20, VOCAB_SIZE)
        return Drafts(min(self.most, most), tuple(answer[known:]), start=len(sequence.tokens))


def drafting_loop(num_blocks: int = 20, *, most: int = 3, holding: int | None = None, **options: object) -> Loop:
    """`holding`: of each slot's drafts, this many; None: all."""
    loop = Loop(layout((None, num_blocks)), drafting=Always(most), **options)  # type: ignore[arg-type]
    loop.backend.num_holding = lambda most: most if holding is None else min(most, holding)
    return loop


def slots(loop: Loop) -> list[tuple[int, int]]:
    """Position and queries of every slot so far."""
    return [(slot.position, slot.num_queries) for step in loop.backend.steps for slot in step.decodes]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("most", range(8))
def test_advances_of_one_to_eight_tokens_give_the_same_answer(most: int, depth: int) -> None:
    loop = drafting_loop(most=most, depth=depth) if most else Loop(layout((None, 20)), depth=depth)
    sequence = loop.add(request("a", range(5), max_tokens=33))[0]
    loop.run()
    loop.check_outputs()
    assert len(loop.backend.steps) == 1 + -(-32 // (1 + most)), "every draft held: as few steps as tokens allow"
    assert len(sequence.timing.token_times_s) == 33


def test_a_step_ahead_has_a_bound_where_the_row_has_its_length() -> None:
    loop = drafting_loop(most=3, holding=1, depth=1)
    sequence = loop.add(request("a", range(4), max_tokens=20))[0]
    first, second, third = loop.launch(), loop.launch(), loop.launch()
    assert first is not None and second is not None and third is not None
    assert [slot.position for slot in (*second.decodes, *third.decodes)] == [4, 8]
    assert (sequence.num_in_flight, sequence.num_drafts_in_flight) == (12, 6)
    assert (sequence.least_next_position, sequence.next_position) == (6, 12)
    assert loop.backend.rows[0].position == 8, "one draft of three held, twice"
    for _ in range(3):
        loop.settle()
    assert (sequence.num_computed, sequence.num_in_flight, sequence.num_drafts_in_flight) == (8, 0, 0)
    loop.run()
    loop.check_outputs()


def test_blocks_are_granted_for_the_bound_and_stay_for_later() -> None:
    loop = drafting_loop(most=7, holding=0)
    loop.add(request("a", range(4), max_tokens=20))
    loop.move()
    granted = []
    while loop.scheduler.has_work:
        step = loop.move()
        granted.append(0 if step is None else sum(len(grant.block_ids) for grant in step.grants))
    assert granted[:6] == [2, 1, 0, 0, 0, 1], "of eight positions one counts: the next slots find their blocks there"
    loop.check_idle()
    loop.check_outputs()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("holding", [0, 2, None])
def test_no_draft_passes_max_tokens(depth: int, holding: int | None) -> None:
    loop = drafting_loop(most=5, holding=holding, depth=depth)
    sequence = loop.add(request("a", range(3), max_tokens=9))[0]
    loop.run()
    assert (sequence.finish_reason, sequence.num_output) == (FinishReason.LENGTH, 9)
    assert max(position + queries for position, queries in slots(loop)) < sequence.max_total_tokens
    loop.check_outputs()


def stop_after(count: int, prompt: range) -> int:
    """A stop id: what an answer to this prompt has at this place, and not before."""
    output = expected_output(request("a", prompt), 0, len(prompt) + count, VOCAB_SIZE)
    assert output[-1] not in output[:-1]
    return output[-1]


@pytest.mark.parametrize("depth", [0, 1])
def test_what_comes_behind_a_stop_is_nobodys(depth: int) -> None:
    loop = drafting_loop(most=7, depth=depth)
    sequence = loop.add(request("a", range(6), max_tokens=20, stop_token_ids=(stop_after(4, range(6)),)))[0]
    loop.run()
    assert (sequence.finish_reason, sequence.num_output) == (FinishReason.STOP, 4)
    assert len(sequence.timing.token_times_s) == 4
    loop.check_outputs()
    # 10 tokens, of which the last was never computed: two blocks of 4 can be found, not the third that was written.
    answer = expected_output(request("a", range(6)), 0, 20, VOCAB_SIZE)
    again = loop.add(request("b", [*range(6), *answer], max_tokens=1))[0]
    loop.run()
    assert again.timing.cached_tokens == 8


def test_a_stop_below_min_tokens_is_passed_inside_an_advance() -> None:
    stop = stop_after(3, range(4))
    loop = drafting_loop(most=7)
    sequence = loop.add(request("a", range(4), max_tokens=12, min_tokens=6, stop_token_ids=(stop,)))[0]
    loop.backend._sample = lambda row, drafts: [stop] * (1 if drafts is None else 1 + drafts.most)  # type: ignore[method-assign]
    loop.run()
    assert (sequence.finish_reason, sequence.num_output) == (FinishReason.STOP, 6)


def test_what_comes_behind_the_end_of_the_text_is_nobodys() -> None:
    loop = drafting_loop(most=7)
    sequence = loop.add(request("a", range(4), max_tokens=20))[0]
    loop.move()
    loop.launch()
    heard: list[int] = []

    def ends(who: Sequence, token_id: int) -> bool:
        assert who is sequence
        heard.append(token_id)
        return len(heard) == 3

    (advance,) = loop.settle(ends)
    assert [token.token_id for token in advance.sampled] == heard == sequence.output_token_ids[1:]
    assert sequence.num_computed == 4 + 3 and not advance.finished, "whoever reads the text ends it"
    loop.scheduler.finish(sequence, FinishReason.STOP)
    loop.check_idle()


def test_guesses_made_before_the_last_tokens_were_known_still_hold() -> None:
    """One step late: the host knows nothing of the step in flight, and its guesses begin before the row's length."""
    loop = Loop(layout((None, 20)), depth=1, drafting=Guesses(4))
    loop.add(request("a", range(4), max_tokens=21))
    loop.run()
    loop.check_outputs()
    assert len(loop.backend.steps) == 1 + 4, "a token of the prompt's, then 5 a slot"


def test_a_preempted_stream_keeps_all_tokens_in_flight() -> None:
    loop = drafting_loop(num_blocks=6, most=3, holding=1, depth=1, kv_watermark=0.0)
    older = loop.add(request("a", range(8), max_tokens=14))[0]
    younger = loop.add(request("b", range(8), max_tokens=14))[0]
    while younger.state is not SequenceState.WAITING or not younger.num_in_flight:
        assert loop.launch() is not None and not younger.is_finished
        if younger.state is not SequenceState.WAITING and len(loop.in_flight) > 1:
            loop.settle()
    before, in_flight, drafted = younger.num_output, younger.num_in_flight, younger.num_drafts_in_flight
    assert 0 < drafted < in_flight
    while younger.num_in_flight:
        loop.settle()
    assert in_flight - drafted < younger.num_output - before < in_flight, "some drafts held, some did not"
    assert younger.high_water < len(younger.tokens), "no more than was surely launched counts as computed again"
    loop.run()
    loop.check_outputs()
    assert older.timing.preemptions == 0


def test_nobody_gives_way_for_drafts() -> None:
    loop = drafting_loop(num_blocks=3, most=7, holding=0, kv_watermark=0.0)
    for name in ("a", "b"):
        loop.add(request(name, [ord(name), 1, 2], max_tokens=6))
    loop.run()
    assert loop.scheduler.counts().preemptions == 0
    assert {queries for _, queries in slots(loop)} > {1}, "where there are blocks there are drafts"
    loop.check_outputs()


def test_drafts_take_what_streams_leave_of_the_budget() -> None:
    loop = drafting_loop(most=7, max_tokens_per_step=8)
    for name in ("a", "b", "c"):
        loop.add(request(name, [ord(name)], max_tokens=20))
    loop.move()
    step = loop.move()
    assert step is not None and [slot.num_queries for slot in step.decodes] == [6, 1, 1]
    assert step.has_drafts and step.num_tokens == step.num_decode_tokens == 8


@pytest.mark.parametrize("max_drafts", [0, 2])
def test_no_slot_has_more_drafts_than_the_backend_takes(max_drafts: int) -> None:
    loop = drafting_loop(most=7, max_drafts=max_drafts)
    loop.add(request("a", range(5), max_tokens=20))
    loop.run()
    loop.check_outputs()
    assert max(queries for _, queries in slots(loop)) == 1 + max_drafts


def changed(loop: Loop, **changes: object) -> Step:
    """The oldest step in flight comes back with something else."""
    step, ticket = loop.in_flight.popleft()
    loop.in_flight.appendleft((step, FakeTicket(replace(ticket.result(), **changes))))  # type: ignore[arg-type]
    return step


def test_a_backend_that_returns_too_many_tokens_fails_the_stream() -> None:
    loop = drafting_loop(most=2)
    sequence = loop.add(request("a", range(3), max_tokens=20))[0]
    loop.move()
    loop.launch()
    changed(loop, sampled={0: (SampledToken(1),) * 4})
    (advance,) = loop.settle()
    assert advance.finished and not advance.sampled
    assert (sequence.finish_reason, sequence.error) == (FinishReason.ERROR, TOO_MANY_TOKENS)
    loop.check_idle()


def test_an_error_comes_behind_the_tokens_before_it() -> None:
    loop = drafting_loop(most=3)
    sequence = loop.add(request("a", range(3), max_tokens=20))[0]
    loop.move()
    loop.launch()
    changed(loop, errors={0: "not finite"})
    (advance,) = loop.settle()
    assert len(advance.sampled) == 4 and advance.finished
    assert (sequence.finish_reason, sequence.error, sequence.num_output) == (FinishReason.ERROR, "not finite", 5)
    loop.check_outputs()
    loop.check_idle()


def test_an_error_behind_the_end_is_nobodys() -> None:
    loop = drafting_loop(most=7)
    sequence = loop.add(request("a", range(6), max_tokens=20, stop_token_ids=(stop_after(4, range(6)),)))[0]
    loop.move()
    loop.launch()
    changed(loop, errors={0: "not finite"})
    loop.settle()
    assert (sequence.finish_reason, sequence.error) == (FinishReason.STOP, None)
