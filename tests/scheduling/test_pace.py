"""The pace of prefill: what a target allows beside running streams, what always moves, which prompts share a step, and
how sizes follow a cost model that learns."""

from __future__ import annotations

import pytest

from tests.scheduling.loop import Loop, layout, request
from twostroke.core.step import DecodeSlot
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.cost.step_cost import Coefficients, StepCost
from twostroke.scheduling.pace import (
    LEAST_TOKENS,
    LONG_WAIT,
    LOST_SHARE,
    ROUND_TOKENS,
    ROUND_TOKENS_UNPACED,
    PrefillPace,
    Room,
    Unpaced,
    pace_of,
)

SHAPE = ModelShape(10**9, 10**9, 10**7, 2 * 10**9, 32, 128, (KVGroupShape(16, None, 1 << 16),))
CEILINGS = Ceilings(4e12, 4e14, "made up")
COST = StepCost(SHAPE, CEILINGS)
LONG = 1 << 20


def pace(itl_target_s: float = 0.01) -> PrefillPace:
    return PrefillPace(COST.seconds, itl_target_s)


def slots(count: int, position: int = 100) -> list[DecodeSlot]:
    return [DecodeSlot(index, position) for index in range(count)]


def opened(paced: PrefillPace, num_streams: int, num_waiting: int = 1, tokens: int = LONG) -> Room:
    return paced.open(slots(num_streams), num_waiting, tokens, LONG)


def seconds(start: int, num_tokens: int, num_streams: int = 0) -> float:
    return COST.seconds(StepWork(((start, num_tokens),), 1, [101] * num_streams))


@pytest.mark.parametrize("start", [0, 1000, 100_000])
def test_the_longest_chunk_within_the_target(start: int) -> None:
    taken = opened(pace(), 10).take(start, LONG, samples=False)
    assert seconds(start, taken, 10) <= 0.01 < seconds(start, taken + ROUND_TOKENS, 10)


def test_chunks_shrink_as_the_context_grows() -> None:
    taken = [opened(pace(0.05), 10).take(start, LONG, samples=False) for start in (0, 10_000, 100_000)]
    assert taken[0] > taken[1] > taken[2] > 0


def test_a_limit_that_fits_is_returned_as_it_is() -> None:
    assert opened(pace(), 10).take(0, 7, samples=True) == 7
    assert opened(pace(), 10).take(0, 0, samples=True) == 0


def test_a_step_is_cut_at_a_round_number_of_tokens() -> None:
    for num_streams in (1, 30):
        room = opened(pace(0.05), num_streams, 2)
        assert room.take(0, 100, samples=True) == 100, "what fits whole is taken whole"
        assert not room.is_full and room.goes_on(0, LONG, samples=False)
        assert (room.take(0, LONG, samples=False) + num_streams + 100) % ROUND_TOKENS == 0
        assert room.is_full and not room.goes_on(0, 7, samples=True)


def test_the_first_prompt_of_a_step_always_moves_and_others_only_where_it_pays() -> None:
    assert opened(pace(1e-9), 30).take(0, LONG, samples=False) == LEAST_TOKENS
    begun = opened(pace(seconds(0, 110, 30)), 30)
    assert begun.take(0, 100, samples=True) == 100 and not begun.is_full
    assert not begun.goes_on(0, LONG, samples=False), "28 tokens more would not fill it up to 256"
    for may_wait, taken in ((True, 0), (False, LEAST_TOKENS)):
        begun = opened(pace(seconds(0, 110, 30)), 30)
        begun.take(0, 100, samples=True)
        assert begun.take(0, LONG, samples=False, may_wait=may_wait) == taken
    filled = opened(pace(seconds(0, ROUND_TOKENS - 20, 20)), 20)
    filled.take(0, 40, samples=True)
    assert filled.goes_on(0, LONG, samples=False) and filled.take(0, LONG, samples=False) == ROUND_TOKENS - 60


def test_decodes_take_their_share_and_never_all() -> None:
    counts = (8, 64, 400)
    taken = [opened(pace(), count).take(0, LONG, samples=False) for count in counts]
    assert taken[0] > taken[1] > taken[2] > LEAST_TOKENS
    assert all(seconds(0, num_tokens, count) <= 0.01 for num_tokens, count in zip(taken, counts, strict=True))
    far = [pace().open(slots(10, position), 1, LONG, LONG).take(0, LONG, samples=False) for position in (10_000, 10**9)]
    assert taken[0] > far[0] > far[1] == LEAST_TOKENS


def test_a_share_of_a_step_is_a_share_of_what_decodes_leave() -> None:
    """Here decodes take most of the step: a quarter of the whole is less than they take, and a quarter of the rest is
    not."""
    contexts = [20_001] * 100
    decodes_s = COST.seconds(StepWork(contexts=contexts))
    target_s = 1.5 * decodes_s

    def with_chunks(*chunks: tuple[int, int]) -> float:
        return COST.seconds(StepWork(chunks, len(chunks), contexts))

    for share in (0.25, 0.5, 1.0):
        limit_s = decodes_s + share * (target_s - decodes_s)
        room = pace(target_s).open(slots(100, 20_000), 2, LONG, LONG)
        taken = room.take(0, LONG, samples=False, share=share)
        assert taken > 4 * LEAST_TOKENS
        assert with_chunks((0, taken)) <= limit_s < with_chunks((0, taken + ROUND_TOKENS))
        begun = pace(target_s).open(slots(100, 20_000), 2, LONG, LONG)
        begun.take(0, LEAST_TOKENS, samples=False)
        assert begun.goes_on(0, LONG, samples=False, share=share)
        more = begun.take(0, LONG, samples=False, share=share)
        assert with_chunks((0, LEAST_TOKENS), (0, more)) <= limit_s
        assert limit_s < with_chunks((0, LEAST_TOKENS), (0, more + ROUND_TOKENS))


def test_no_share_leaves_prompts_less_than_always_moves() -> None:
    decodes_s = COST.seconds(StepWork(contexts=[20_001] * 100))
    tight = pace(0.5 * decodes_s).open(slots(100, 20_000), 1, LONG, LONG)
    assert tight.take(0, LONG, samples=False, share=0.25) == LEAST_TOKENS
    alone = pace(1e-9).open([], 1, LONG, 512)
    assert alone.take(0, 512, samples=False, share=0.25) == 512, "without streams the token budget alone counts"


@pytest.mark.parametrize(
    ("promised_ms", "taken"),
    [
        (29, 16),  # 0.9 of it has room for just these
        (26, 16),  # what always moves takes exactly the promise
        (25.9, 12),
        (20, 8),  # room for 10
        (14, 4),
        (13.9, 16),  # no room for a small round: the streams and four tokens break it, so do the streams and sixteen
        (5, 16),
    ],
)
def test_what_always_moves_does_not_break_a_promise_that_can_be_kept(promised_ms: float, taken: int) -> None:
    """Without a target of the backend's own. Eight streams take 10 ms and each token of a prompt one."""

    def step_ms(work: StepWork) -> float:
        return (10.0 if work.contexts else 0.0) + sum(length for _, length in work.chunks)

    for share in (1.0, 0.125):
        room = pace_of(step_ms, None).open(slots(8), 1, LONG, LONG, promised_ms)
        assert room.take(0, LONG, samples=False, share=share) == taken
    few = pace_of(step_ms, None).open(slots(8), 1, 3, LONG, 13.9)
    assert few.take(0, 3, samples=True) == 3, "a prompt of three tokens has no more than these"


def test_where_nothing_is_promised_a_target_may_be_missed_by_what_always_moves() -> None:
    decodes_s = COST.seconds(StepWork(contexts=[101] * 300))
    for promised_s, least in ((float("inf"), LEAST_TOKENS), (seconds(0, 40, 300), LEAST_TOKENS // 2)):
        room = pace(1.0001 * decodes_s).open(slots(300), 1, LONG, LONG, promised_s)
        assert room.take(0, LONG, samples=False) == least
    assert ROUND_TOKENS_UNPACED < LEAST_TOKENS


def test_streams_give_way_to_a_crowd_of_prompts() -> None:
    usual_s = pace().itl_target_s
    assert pace().allowed_s(32, 1, 500) == usual_s
    assert pace().allowed_s(32, 4, 2000) == usual_s
    assert pace().allowed_s(32, 5, 2500) == pytest.approx(1.25 * usual_s)
    assert pace().allowed_s(32, 16, 8000) == pytest.approx(12 * usual_s)


def test_streams_that_have_waited_long_for_a_burst_wait_as_long_for_the_rest_of_it() -> None:
    usual_s = 0.002
    long_s = LONG_WAIT * usual_s
    tokens = next(count for count in range(1, LONG) if seconds(0, count, 32) > long_s)

    def next_step(num_tokens: int, num_waiting: int, waiting_tokens: int) -> float:
        """What the step after a burst's with that many tokens may take."""
        paced = pace(usual_s)
        last = opened(paced, 32, 16, num_tokens)  # of which four times the target is allowed, and more
        assert last.take(0, num_tokens, samples=True) == num_tokens
        room = paced.open(slots(32), num_waiting, waiting_tokens, LONG)
        return seconds(0, room.take(0, LONG, samples=False), 32)

    def is_long(num_tokens: int, num_waiting: int, waiting_tokens: int) -> bool:
        return next_step(num_tokens, num_waiting, waiting_tokens) > 2 * usual_s

    assert is_long(tokens, 2, 1000)
    assert is_long(tokens, 2, 2 * tokens), "two that need a step each"
    assert not is_long(tokens, 2, 2 * tokens + 1), "longer prompts are no end of a burst"
    assert next_step(tokens, 16, 16_000) > 2 * long_s, "a crowd is still one"
    assert not is_long(tokens - 1, 2, 1000), "chance arrivals may bring that about"
    paced = pace(usual_s)
    opened(paced, 32, 16, tokens).take(0, tokens, samples=True)
    paced.open(slots(32), 0, 0, LONG)  # a step without prompts: the burst is over
    assert seconds(0, opened(paced, 32, 2, 1000).take(0, LONG, samples=False), 32) <= usual_s


def test_sizes_follow_the_cost_model_as_it_learns() -> None:
    truth = StepCost(SHAPE, CEILINGS, Coefficients(matmul=2.0, attention=3.0))
    cost = StepCost(SHAPE, CEILINGS)
    paced = PrefillPace(cost.seconds, 0.01)
    first = opened(paced, 10).take(0, LONG, samples=False)
    for _ in range(50):
        work = StepWork(((0, opened(paced, 10).take(0, LONG, samples=False)),), 1, [101] * 10)
        cost.observe(work, truth.seconds(work))
    learnt = opened(paced, 10).take(0, LONG, samples=False)
    assert learnt < 0.8 * first
    assert truth.seconds(StepWork(((0, learnt),), 1, [101] * 10)) == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("times", [3, 10, 1000])
def test_a_step_that_was_held_up_is_soon_made_good(times: int) -> None:
    """However small the chunks that it leads to: those that follow teach what it should have taken. Once the model has
    seen a dozen steps, it hardly believes such a step at all."""
    for num_before in (0, 12):
        cost = StepCost(SHAPE, CEILINGS)
        paced = PrefillPace(cost.seconds, 0.01)
        usual = opened(paced, 10).take(0, LONG, samples=False)
        work = StepWork(((0, usual),), 1, [101] * 10)
        for _ in range(num_before):
            cost.observe(work, COST.seconds(work))
        cost.observe(work, times * COST.seconds(work))
        if num_before:
            assert opened(paced, 10).take(0, LONG, samples=False) >= 0.9 * usual
        for _ in range(5):
            work = StepWork(((0, opened(paced, 10).take(0, LONG, samples=False)),), 1, [101] * 10)
            cost.observe(work, COST.seconds(work))
        assert opened(paced, 10).take(0, LONG, samples=False) == pytest.approx(usual, rel=0.1)


def test_a_target_must_be_positive() -> None:
    with pytest.raises(ValueError, match="itl_target_s"):
        pace(0.0)


def test_without_a_pace_a_step_takes_whatever_comes() -> None:
    room = Unpaced().open(slots(500), 3, LONG, LONG)
    assert [room.take(0, LONG, samples=True) for _ in range(3)] == [LONG] * 3
    assert room.goes_on(0, LONG, samples=False) and not room.is_full


def lengths_of_first_steps(lengths: list[int], num_steps: int, cost: StepCost = COST) -> list[list[int]]:
    """The chunks that each of the first steps reads of prompts sent at once, where streams never mind."""
    loop = Loop(
        layout((None, 20_000)),
        max_context=12_000,
        max_tokens_per_step=8192,
        max_running=64,
        pace=PrefillPace(cost.seconds, 10.0),
    )
    add_prompts(loop, lengths)
    steps = [loop.move() for _ in range(num_steps)]
    return [[len(chunk.token_ids) for chunk in step.prefills] for step in steps if step is not None]


def test_prompts_that_fill_the_machine_are_read_one_after_another() -> None:
    """Each is long enough that a second step costs next to nothing, so nobody waits for those behind."""
    lengths = [6000, 5500, 7000, 6500]
    assert seconds(0, 6000) + seconds(0, 2192) - COST.seconds(StepWork(((0, 6000), (0, 2192)), 2)) < (
        LOST_SHARE * seconds(0, 6000)
    )
    assert lengths_of_first_steps(lengths, 4) == [[length] for length in lengths]


def test_prompts_that_do_not_share_a_step() -> None:
    """Where reading the weights or launching takes most of a step, prompts go on sharing it."""
    assert lengths_of_first_steps([512] * 8, 1) == [[512] * 8]
    launching = StepCost(SHAPE, CEILINGS, Coefficients(prefill_s=0.01))
    assert lengths_of_first_steps([6000, 5500], 2, launching) == [[6000, 2192], [3308]]


def test_a_long_line_is_not_held_up_for_the_first_of_it() -> None:
    """Every early end delays all who wait behind: with many of them a step takes more prompts before it ends."""
    few, many = (lengths_of_first_steps([4000] * count, 1)[0] for count in (2, 40))
    assert few == [4000] and many == [4000, 4000, 192]


def test_prompts_alone_take_the_whole_step_and_beside_streams_only_their_share() -> None:
    tight = PrefillPace(COST.seconds, itl_target_s=1e-9)  # nothing fits, so the least is taken
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
    tight = PrefillPace(COST.seconds, itl_target_s=1e-9)
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


def most_within(target_s: float) -> int:
    """The most prompt tokens of a step with hardly any streams."""
    return max((count for count in range(1, 1024) if seconds(0, count) <= target_s), default=LEAST_TOKENS)


def test_a_burst_is_read_in_large_steps_to_its_end() -> None:
    loop = loop_of(seconds(0, 1024) / 5)
    add_prompts(loop, [100] * 64)
    *full, last = read_beside_streams(loop)
    assert full == [1024 - num_streams for num_streams in (10, 20, 30, 40, 50)]
    assert last == 64 * 100 - 1024 - sum(full)


def test_the_same_streams_are_spared_by_whoever_comes_after_the_burst() -> None:
    target_s = seconds(0, 1024) / 5
    loop = loop_of(target_s)
    add_prompts(loop, [100] * 32)
    assert max(read_beside_streams(loop)) > 1000
    assert loop.move() is not None  # a step without prompts
    add_prompts(loop, [100] * 4)
    assert max(read_beside_streams(loop)) <= most_within(target_s)


def test_a_long_prompt_at_the_end_of_a_burst_is_read_at_the_usual_pace() -> None:
    target_s = seconds(0, 1024) / 5
    loop = loop_of(target_s)
    add_prompts(loop, [100] * 32 + [3000])
    read = read_beside_streams(loop)
    assert read[0] > 900
    assert max(read[4:]) <= most_within(target_s), "the short ones and its beginning, and then less"
