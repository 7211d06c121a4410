"""Far too little KV: the shapes that are known to stall or to livelock engines, by name; random schedules over a tenth
of what is asked for; and what is lost of the output rate. Every token is checked by the fake backend."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.scheduling.loop import Loop, layout, request
from tests.scheduling.test_policies import SPEC
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.sequence import FinishReason, SequenceState
from twostroke.core.service_level import ServiceLevel, ServiceLevels
from twostroke.planner.simulate import simulate
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.plan import StepPlan
from twostroke.scheduling.policies import POLICIES

LEVELS = ServiceLevels(
    (
        ServiceLevel("default"),
        ServiceLevel("chat", ttft_s=20.0, itl_s=3.0),
        ServiceLevel("late", ttft_s=0.001, weight=2.0),
    )
)
both_depths = pytest.mark.parametrize("depth", [0, 1])
every_policy = pytest.mark.parametrize("policy", POLICIES)


@both_depths
@every_policy
def test_two_long_requests_that_each_need_more_than_half(depth: int, policy: str) -> None:
    """Both fit when they are let in, and neither beside the other in the end: one waits, and is not sent away again and
    again."""
    loop = Loop(layout((None, 16)), depth=depth, policy=policy, kv_watermark=0.0)
    pair = [loop.add(request(name, range(8), max_tokens=36, seed=number))[0] for number, name in enumerate("ab")]
    loop.run(max_turns=300)
    loop.check_outputs()
    assert sorted(one.timing.preemptions for one in pair) == [0, 1]


@both_depths
@every_policy
def test_one_that_fits_alone_only_among_short_ones_that_never_end(depth: int, policy: str) -> None:
    loop = Loop(layout((None, 16)), depth=depth, policy=policy, max_running=4)
    large = None
    for number in range(400):
        if large is not None and large.is_finished:
            break
        if number == 10:
            large = loop.add(request("large", range(50), max_tokens=14, arrival_s=loop.now_s))[0]
        if len(loop.unfinished) < 6:
            loop.add(request(f"{number}", range(6), max_tokens=9, arrival_s=loop.now_s, seed=number, tenant="short"))
        loop.turn()
    assert large is not None and large.is_finished, "it starved"
    loop.run()
    loop.check_outputs()


@both_depths
@every_policy
@pytest.mark.parametrize("gone", ["elder", "younger", "both"])
def test_aborts_during_preemption(depth: int, policy: str, gone: str) -> None:
    """Whoever took the blocks or lost them goes, while tokens are in flight: all blocks are free, all others end."""
    loop = Loop(layout((None, 10)), depth=depth, policy=policy, kv_watermark=0.0)
    _, younger = (loop.add(request(name, range(8), max_tokens=24))[0] for name in ("elder", "younger"))
    third = loop.add(request("third", range(5), max_tokens=4, arrival_s=1.0))[0]
    while not younger.timing.preemptions and not third.timing.preemptions:
        loop.launch()
        while len(loop.in_flight) > depth:
            loop.settle()
    for name in ("elder", "younger") if gone == "both" else (gone,):
        loop.scheduler.abort(name)
        loop.scheduler.check()
    loop.run(max_turns=200)
    loop.check_outputs()
    assert third.finish_reason is FinishReason.LENGTH


def test_who_costs_least_to_compute_again_loses_its_kv() -> None:
    loop = Loop(layout((None, 40)), kv_watermark=0.0)
    admission, plan = loop.scheduler._admission, StepPlan(10)
    elder = loop.add(request("elder", range(4), max_tokens=40))[0]
    cheap = loop.add(request("cheap", range(6), max_tokens=30, arrival_s=1.0))[0]
    dear = loop.add(request("dear", range(30, 54), max_tokens=12, arrival_s=2.0))[0]
    loop.turn()
    assert admission._victim(plan, elder) is cheap, "the youngest has four times as much to compute"
    assert admission._victim(plan, cheap) is dear and admission._victim(plan, dear) is None, "no older one gives way"
    shares = loop.add(request("shares", range(30, 58), max_tokens=12, arrival_s=3.0))[0]
    loop.turn()
    assert loop.scheduler.ledger.num_shared(shares) == 24
    assert admission._victim(plan, elder) is dear, "most of it is held by another now, and stays"
    loop.run()
    loop.check_outputs()


def test_who_was_promised_an_even_stream_keeps_its_kv_if_another_can_give_way() -> None:
    levels = ServiceLevels((ServiceLevel("default"), ServiceLevel("even", itl_s=0.001)))
    loop = Loop(layout((None, 14)), kv_watermark=0.0, levels=levels)
    loop.add(request("elder", range(4), max_tokens=40))
    other = loop.add(request("other", range(10, 30), max_tokens=12, arrival_s=1.0))[0]
    even = loop.add(request("even", range(40, 46), max_tokens=20, arrival_s=2.0, level="even"))[0]
    while not other.timing.preemptions:
        loop.turn()
    assert even.timing.preemptions == 0, "it is younger, and costs less"
    loop.run()
    loop.check_outputs()


def test_kv_is_promised_by_the_lengths_that_answers_have_and_not_by_those_they_may_have() -> None:
    """Answers may have 40 tokens, and have four: as many run as that allows, and hardly one is preempted."""
    loop = Loop(layout((None, 16)), max_running=8, kv_watermark=0.0, prefix_caching=False)
    most = 0
    for number in range(40):
        asked = request(f"{number}", range(6), max_tokens=40, seed=number, arrival_s=loop.now_s)
        sequence = loop.add(asked)[0]
        sequence.max_total_tokens = 10  # as if the fourth token ended it
        while len(loop.unfinished) > 7:
            loop.turn()
            states = [one.state for one in loop.unfinished]
            most = max(most, states.count(SequenceState.RUNNING)) if number > 20 else 0
    while loop.unfinished:
        loop.turn()
    assert most >= 4, "sixteen blocks hold five of ten tokens"
    assert sum(one.timing.preemptions for one in list(loop.records)[20:]) <= 2


def play_at_random(seed: int) -> None:
    """Requests at random over a pool that holds a tenth of what they ask for: each ends with its own tokens."""
    drawn = random.Random(seed)
    block_size, num_requests = drawn.choice([1, 2, 4]), drawn.randint(4, 12)
    sizes = [(drawn.randint(1, 9), drawn.randint(1, 9)) for _ in range(num_requests)]
    demand = sum(prompt + answer for prompt, answer in sizes)
    num_blocks = max(-(-demand // 10), max(map(sum, sizes))) // block_size + 1
    window = drawn.choice([None, None, (drawn.randint(2, 9), 2 * num_blocks)])
    groups = ((None, num_blocks),) if window is None else ((None, num_blocks), window)
    loop = Loop(
        layout(*groups, block_size=block_size),
        depth=drawn.randint(0, 1),
        seed=seed,
        policy=drawn.choice(list(POLICIES)),
        levels=LEVELS,
        max_running=drawn.randint(1, 8),
        max_tokens_per_step=drawn.randint(2, 16),
        prefix_caching=drawn.random() < 0.8,
        drafts=drawn.choice([0, 0, 3]),
    )
    for number, (prompt, answer) in enumerate(sizes):
        first = drawn.randint(0, 3)
        asked = request(
            f"{number}",
            range(first, first + prompt),
            max_tokens=answer,
            arrival_s=loop.now_s,
            seed=number,
            tenant=drawn.choice(["", "a", "b"]),
            call=drawn.choice(["", f"{number}"]),
            level=drawn.choice(["", "chat", "late"]),
            priority=drawn.choice([0, 0, -1, 1]),
        )
        loop.add(asked)
        for _ in range(drawn.randint(0, 4)):
            loop.turn()
        if drawn.random() < 0.1:
            loop.scheduler.abort(drawn.choice(list(loop.records)).request.request_id)
    loop.run(max_turns=40 * demand)
    loop.check_outputs()


def test_every_admitted_request_finishes_over_a_tenth_of_the_demand() -> None:
    for seed in range(200):
        play_at_random(seed)


@pytest.mark.slow
def test_the_same_in_ten_thousand_schedules() -> None:
    for seed in range(200, 10_200):
        play_at_random(seed)


def test_a_pool_of_a_tenth_writes_nearly_as_fast_as_the_best_number_of_streams() -> None:
    """A step takes 10 ms, and 0.1 ms a token: many streams are worth having. The best is that of five
    numbers of streams; the policy is told none of them."""
    drawn = random.Random(5)
    trace = [TraceRequest(0.0, drawn.randint(50, 300), drawn.randint(20, 200)) for _ in range(100)]
    demand = sum(one.prompt_tokens + one.output_tokens for one in trace)
    spec = replace(
        SPEC,
        step_seconds=lambda work: 0.01 + 1e-4 * work.num_tokens if work.num_tokens else 0.0,
        layout=KVLayout(16, (KVGroup((0,), None, demand // 10 // 16),)),
        scheduler=replace(SPEC.scheduler, max_tokens_per_step=256),
    )
    reports = {}
    for most in (4, 8, 12, 16, 64):
        reports[most] = simulate(replace(spec, scheduler=replace(spec.scheduler, max_running=most)), trace)
        assert len(reports[most].served.ttft_s) == len(trace)
    best = max(report.output_tokens_per_s for report in reports.values())
    assert reports[64].output_tokens_per_s > 0.85 * best
