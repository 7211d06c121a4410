"""The pace of prefill beside running streams: what a target allows, what always moves, what is learnt."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.step import DecodeSlot, PrefillChunk, Step
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.scheduling.pace import FIRST_EFFICIENCY, LEAST_TOKENS, LONG_WAIT, ROUND_TOKENS, PrefillPace

SHAPE = ModelShape(10**9, 10**9, 10**7, 2 * 10**9, 32, 128, (KVGroupShape(16, None, 1 << 16),))
CEILINGS = Ceilings(4e12, 4e14, "made up")


def pace(itl_target_s: float = 0.01) -> PrefillPace:
    return PrefillPace(SHAPE, CEILINGS, itl_target_s)


@pytest.mark.parametrize("start", [0, 1000, 100_000])
def test_the_longest_chunk_within_the_target(start: int) -> None:
    fits = pace().tokens_within(0.01, start, 1 << 20)
    assert pace().seconds(start, fits) <= 0.01 < pace().seconds(start, fits + 1)


def test_chunks_shrink_as_the_context_grows() -> None:
    fits = [pace().tokens_within(0.01, start, 1 << 20) for start in (0, 10_000, 100_000)]
    assert fits[0] > fits[1] > fits[2] > 0


def test_a_limit_that_fits_is_returned_as_it_is() -> None:
    assert pace().tokens_within(0.01, 0, 7) == 7
    assert pace().tokens_within(0.01, 0, 0) == 0


def test_a_step_is_cut_at_a_round_number_of_tokens() -> None:
    loose, long = pace(0.05), 1 << 20
    fits = loose.tokens_within(0.05, 0, long)
    assert loose.chunk_tokens(0.05, 0, long, 0, 0) == fits // ROUND_TOKENS * ROUND_TOKENS
    assert (loose.chunk_tokens(0.05, 0, long, 30, 100) + 130) % ROUND_TOKENS == 0
    assert loose.chunk_tokens(0.05, 0, 7, 30, 100) == 7, "what fits whole is taken whole"


def test_the_first_prompt_of_a_step_always_moves_and_others_only_where_it_pays() -> None:
    loose, long = pace(0.05), 1 << 20
    assert loose.chunk_tokens(1e-9, 0, long, 30, 0) == LEAST_TOKENS
    assert loose.chunk_tokens(1e-9, 0, long, 30, 100) == 0
    assert loose.chunk_tokens(1e-9, 0, long, 30, 100, may_wait=False) == LEAST_TOKENS
    a_few_s = loose.seconds(0, ROUND_TOKENS - 50)
    assert loose.has_room(a_few_s, 20, 40) and loose.chunk_tokens(a_few_s, 0, long, 20, 40) == ROUND_TOKENS - 60
    assert not loose.has_room(a_few_s, 0, 25) and loose.chunk_tokens(a_few_s, 0, long, 0, 25) == 0
    assert loose.has_room(0.0, 500, 0)


def slots(count: int, position: int = 100) -> list[DecodeSlot]:
    return [DecodeSlot(index, position) for index in range(count)]


def test_decodes_take_their_share_and_never_all() -> None:
    alone, beside_few, beside_many = (pace().seconds_for_prefill(slots(n), 1, 500) for n in (8, 10, 100))
    assert pace().itl_target_s > alone > beside_few > beside_many > 0.0
    assert pace().seconds_for_prefill(slots(100, position=10**9), 1, 500) > 0.0
    assert pace().seconds_for_prefill(slots(10, position=10_000), 1, 500) < beside_few


def test_streams_give_way_to_a_crowd_of_prompts() -> None:
    usual = pace().seconds_for_prefill(slots(32), 1, 500)
    assert pace().seconds_for_prefill(slots(32), 4, 2000) == usual
    assert pace().seconds_for_prefill(slots(32), 5, 2500) == pytest.approx(usual + pace().itl_target_s / 4)
    assert pace().seconds_for_prefill(slots(32), 16, 8000) == pytest.approx(usual + 11 * pace().itl_target_s)


def test_streams_that_have_waited_long_for_a_burst_wait_as_long_for_the_rest_of_it() -> None:
    paced = pace()
    usual, long_s = paced.seconds_for_prefill(slots(32), 2, 1000), LONG_WAIT * paced.itl_target_s
    paced.remember(2048, long_s)
    assert paced.seconds_for_prefill(slots(32), 2, 1000) == long_s
    assert paced.seconds_for_prefill(slots(32), 2, 2 * 2048) == long_s, "two that need a step each"
    assert paced.seconds_for_prefill(slots(32), 2, 2 * 2048 + 1) == usual, "longer prompts are no end of a burst"
    assert paced.seconds_for_prefill(slots(32), 16, 16_000) > long_s, "a crowd is still one"
    paced.remember(2048, 0.99 * long_s)  # chance arrivals may bring that about
    assert paced.seconds_for_prefill(slots(32), 2, 1000) == usual
    paced.remember(2048, long_s)
    paced.remember(0, 0.0)  # a step without prompts: the burst is over
    assert paced.seconds_for_prefill(slots(32), 2, 1000) == usual


def step_of(num_tokens: int) -> Step:
    return Step(0, prefills=(PrefillChunk(0, 0, tuple(range(num_tokens)), True),))


def test_efficiency_is_learnt_from_steps_that_arithmetic_binds() -> None:
    learning = pace()
    slow_s = 1.5 * learning.seconds(0, 1024)
    learning.observe(step_of(100), slow_s)  # bound by reading the weights
    assert learning.efficiency == FIRST_EFFICIENCY
    for _ in range(50):
        learning.observe(step_of(1024), slow_s)
    assert learning.seconds(0, 1024) == pytest.approx(slow_s, rel=0.02)


def test_a_step_that_was_held_up_teaches_little() -> None:
    learning = pace()
    learning.observe(step_of(1024), 1000 * learning.seconds(0, 1024))
    assert learning.efficiency > 0.95 * FIRST_EFFICIENCY


def test_a_target_must_be_positive() -> None:
    with pytest.raises(ValueError, match="itl_target_s"):
        pace(0.0)


def test_prompts_alone_take_the_whole_step_and_beside_streams_only_their_share() -> None:
    tight = PrefillPace(SHAPE, CEILINGS, itl_target_s=1e-9)  # nothing fits, so the least is taken
    loop = Loop(layout((None, 400)), max_context=1200, max_tokens_per_step=512, pace=tight)
    for name in "abcd":
        loop.add(request(name, range(7), max_tokens=60))
    loop.move()
    loop.add(request("long", range(1000), max_tokens=2))
    chunks = []
    for _ in range(6):
        step = loop.move()
        assert step is not None
        chunks += [len(chunk.token_ids) for chunk in step.prefills]
    assert chunks == [LEAST_TOKENS] * 6


def test_whoever_joins_a_step_has_work_in_it() -> None:
    """Behind a deep cached prefix tokens are dear: what seemed to fit at position 0 does not where it begins."""
    loop = Loop(layout((None, 4000)), max_context=12_000, max_tokens_per_step=2048, pace=pace(itl_target_s=0.0007))
    loop.add(request("reader", range(9000), max_tokens=1))
    while loop.move() is not None:
        pass
    for number in range(16):
        loop.add(request(f"stream {number}", range(20_000 + number, 20_007 + number), max_tokens=60))
    for _ in range(3):
        loop.move()
    loop.add(request("short", range(30_000, 30_040), max_tokens=2))
    loop.add(request("deep", [*range(9000), *range(40_000, 40_200)], max_tokens=2))
    joined = 0
    for _ in range(4):
        step = loop.move()
        assert step is not None
        at_work = {chunk.seq_id for chunk in step.prefills} | {slot.seq_id for slot in step.decodes}
        assert {join.seq_id for join in step.joins} <= at_work
        joined += len(step.joins)
    assert joined == 2


def test_without_streams_the_token_budget_alone_counts() -> None:
    tight = PrefillPace(SHAPE, CEILINGS, itl_target_s=1e-9)
    loop = Loop(layout((None, 400)), max_context=1200, max_tokens_per_step=512, pace=tight)
    loop.add(request("long", range(1000), max_tokens=2))
    step = loop.move()
    assert step is not None
    assert [len(chunk.token_ids) for chunk in step.prefills] == [512]


def read_beside_streams(loop: Loop) -> list[int]:
    """The prompt tokens of each step that has streams, as long as there are prompts to read."""
    read = []
    while (counts := loop.scheduler.counts()).waiting or counts.running_prefill:
        step = loop.move()
        assert step is not None
        if step.decodes:
            read.append(sum(len(chunk.token_ids) for chunk in step.prefills))
    return read


def loop_of(itl_target_s: float) -> Loop:
    paced = pace(itl_target_s)
    return Loop(layout((None, 4000)), depth=1, max_context=12_000, max_tokens_per_step=1024, max_running=64, pace=paced)


def add_prompts(loop: Loop, lengths: list[int], max_tokens: int = 200) -> None:
    first = 10_000 * len(loop.records)
    for number, length in enumerate(lengths):
        begin = first + 10_000 * number
        loop.add(request(f"{begin}", range(begin, begin + length), max_tokens=max_tokens))


def test_a_burst_is_read_in_large_steps_to_its_end() -> None:
    loop = loop_of(pace().seconds(0, 1024) / 5)
    add_prompts(loop, [100] * 64)
    *full, last = read_beside_streams(loop)
    assert full == [1024 - num_streams for num_streams in (10, 20, 30, 40, 50)]
    assert last == 64 * 100 - 1024 - sum(full)


def test_the_same_streams_are_spared_by_whoever_comes_after_the_burst() -> None:
    target_s = pace().seconds(0, 1024) / 5
    loop = loop_of(target_s)
    add_prompts(loop, [100] * 32)
    assert max(read_beside_streams(loop)) > 1000
    assert loop.move() is not None  # a step without prompts
    add_prompts(loop, [100] * 4)
    assert max(read_beside_streams(loop)) <= pace().tokens_within(target_s, 0, 1024)


def test_a_long_prompt_at_the_end_of_a_burst_is_read_at_the_usual_pace() -> None:
    target_s = pace().seconds(0, 1024) / 5
    loop = loop_of(target_s)
    add_prompts(loop, [100] * 32 + [8000])
    read = read_beside_streams(loop)
    assert read[0] > 900
    assert max(read[4:]) <= pace().tokens_within(target_s, 0, 1024), "the short ones and its beginning, and then less"
