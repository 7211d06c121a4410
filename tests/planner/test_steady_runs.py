"""Turns that are decided beforehand against the slow twin, where the scheduler decides every step: the same times to
the last bit, over random traces with shared prefixes, little KV, windows, paces, routers and replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.step import Step
from twostroke.core.timing import SequenceTiming
from twostroke.cost.floor import StepWork
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.cost.step_cost import StepCost
from twostroke.planner.report import SimulationReport
from twostroke.planner.simulate import ROUTERS, Prompts, Replica, ReplicaSpec, simulate
from twostroke.planner.trace import Lengths, TraceRequest, poisson
from twostroke.scheduling.config import SchedulerConfig
from twostroke.scheduling.steady import Turn

CEILINGS = Ceilings(4e12, 400e12, "a test")


@st.composite
def specs(draw: st.DrawFn) -> ReplicaSpec:
    windows = draw(st.sampled_from([(None,), (None,), (None,), (24,), (None, 10)]))
    groups = tuple(KVGroupShape(16, window, 65_536) for window in windows)
    shape = ModelShape(8 * 10**9, 7 * 10**9, 5 * 10**8, 15 * 10**9, 32, 128, groups)
    # From hardly more than one request needs, so that streams preempt each other, to plenty.
    num_blocks = draw(st.sampled_from([24, 30, 60, 1000]))
    return ReplicaSpec(
        StepCost(shape, CEILINGS).seconds,
        shape,
        CEILINGS,
        SchedulerConfig(
            max_context=150,
            max_tokens_per_step=draw(st.sampled_from([32, 512])),
            max_running=draw(st.sampled_from([2, 5, 64])),
            prefix_caching=draw(st.booleans()),
        ),
        KVLayout(draw(st.sampled_from([7, 16])), tuple(KVGroup((0,), window, num_blocks) for window in windows)),
        host_s=draw(st.sampled_from([0.0, 3e-4])),
        newcomer_s=draw(st.sampled_from([0.0, 7e-4])),
        newcomer_s_per_token=draw(st.sampled_from([0.0, 1e-5])),
        itl_target_s=draw(st.sampled_from([None, 0.02, 0.002])),
        run_ahead=draw(st.booleans()),
    )


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    trace, now_s = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        now_s += draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 2.0]))
        prompt_tokens = draw(st.integers(1, 90))
        prefix = draw(st.sampled_from([None, "system", "other"]))
        shared = min(prompt_tokens, draw(st.sampled_from([16, 40, 70]))) if prefix else 0
        trace.append(TraceRequest(now_s, prompt_tokens, draw(st.integers(1, 60)), prefix, shared))
    return trace


def facts(report: SimulationReport) -> tuple[object, ...]:
    served = report.served
    return (
        sorted(zip(served.ttft_s, served.queue_s, map(str, served.tpot_s), strict=True)),
        sorted(served.itl_s),
        (served.prompt_tokens, served.output_tokens, report.num_refused, report.num_steps, report.num_preemptions),
        (report.prefix_hit_tokens, report.duration_s, report.busy_share),
    )


@settings(max_examples=60, deadline=None)
@given(specs(), traces(), st.integers(1, 3), st.sampled_from(ROUTERS))
def test_a_simulation_is_the_same_to_the_last_bit(
    spec: ReplicaSpec, trace: list[TraceRequest], replicas: int, router: str
) -> None:
    slow = simulate(spec, trace, replicas=replicas, router=router, step_by_step=True)
    quick = simulate(spec, trace, replicas=replicas, router=router)
    assert facts(quick) == facts(slow)


def play(replica: Replica, trace: list[TraceRequest]) -> dict[int, SequenceTiming]:
    found, prompts = {}, Prompts()

    def step() -> None:
        found.update({one.sequence.seq_id: one.sequence.timing for one in replica.step() if one.finished})
        assert replica.num_unfinished >= 0

    for asked in trace:
        while replica.now_s < asked.arrival_s and replica.busy:
            step()
        replica.add(prompts.request(asked))
        replica.scheduler.check()
    while replica.busy:
        step()
    replica.scheduler.check()
    return found


@settings(max_examples=40, deadline=None)
@given(specs(), traces())
def test_every_request_has_the_same_story_and_the_ledger_holds(spec: ReplicaSpec, trace: list[TraceRequest]) -> None:
    """The ledger is proved whenever the scheduler was told of turns; what is left of each sample is the same."""
    quick, slow = Replica(spec), Replica(spec, step_by_step=True)
    found, expected = play(quick, trace), play(slow, trace)
    for timing in (*found.values(), *expected.values()):  # summed in another order, and in differences of clocks
        timing.decode_compute_s = round(timing.decode_compute_s, 9)
    assert found == expected
    assert len(found) == len(trace)
    assert quick.scheduler.counts() == slow.scheduler.counts()
    assert (quick.num_unfinished, slow.num_unfinished) == (0, 0)
    assert (quick.num_steps, quick.busy_s, quick.now_s) == (slow.num_steps, slow.busy_s, slow.now_s)


def test_turns_without_prompts_end_a_burst() -> None:
    """Decided one by one or together: whoever comes after them is read at the usual pace again."""
    shape = ModelShape(8 * 10**9, 7 * 10**9, 5 * 10**8, 15 * 10**9, 32, 128, (KVGroupShape(32, None, 131_072),))
    layout = KVLayout(16, (KVGroup((0,), None, 1000),))
    cost, config = StepCost(shape, CEILINGS), SchedulerConfig(400, 512, 64)
    spec = ReplicaSpec(cost.seconds, shape, CEILINGS, config, layout, itl_target_s=0.002)
    burst = [TraceRequest(0.0, 90, 100)] * 16
    trace = [*burst, TraceRequest(0.3, 256, 10), TraceRequest(0.3, 256, 10)]
    quick, slow = play(Replica(spec), trace), play(Replica(spec, step_by_step=True), trace)
    for found in (quick, slow):
        assert [found[number].prefill_chunks for number in (16, 17)] == [4, 4]
    assert all(quick[number].token_times_s == slow[number].token_times_s for number in slow)


def test_most_steps_are_decided_beforehand_and_some_preempt() -> None:
    """That the tests above have something to compare."""
    shape = ModelShape(8 * 10**9, 7 * 10**9, 5 * 10**8, 15 * 10**9, 32, 128, (KVGroupShape(32, None, 131_072),))
    asked = 0

    def step_seconds(work: StepWork) -> float:
        return StepCost(shape, CEILINGS).seconds(work)

    class Counting(Replica):
        def _launch(self, step: Step | None, work: StepWork, newcomer_tokens: int = 0) -> None:
            nonlocal asked
            asked += step is None
            super()._launch(step, work, newcomer_tokens)

    layout = KVLayout(16, (KVGroup((0,), None, 60),))
    spec = ReplicaSpec(step_seconds, shape, CEILINGS, SchedulerConfig(150, 512, 64), layout)
    replica = Counting(spec)
    play(replica, poisson(40.0, 80, Lengths(10, 80), Lengths(10, 60)))
    assert replica.scheduler.counts().preemptions > 0
    assert asked > replica.num_steps / 3
    roomy = Counting(replace(spec, layout=KVLayout(16, (KVGroup((0,), None, 5000),))))
    asked = 0
    play(roomy, poisson(4.0, 80, Lengths(10, 80), Lengths(10, 60)))
    assert asked > 0.8 * roomy.num_steps


def test_no_more_turns_are_taken_than_are_decided() -> None:
    shape = ModelShape(8 * 10**9, 7 * 10**9, 5 * 10**8, 15 * 10**9, 32, 128, (KVGroupShape(32, None, 131_072),))
    layout = KVLayout(16, (KVGroup((0,), None, 60),))
    spec = ReplicaSpec(StepCost(shape, CEILINGS).seconds, shape, CEILINGS, SchedulerConfig(150, 512, 64), layout)
    replica = Replica(spec)
    replica.add(Prompts().request(TraceRequest(0.0, 10, 20)))
    assert replica.scheduler.steady_run(0) is None  # it waits
    replica.step()
    run = replica.scheduler.steady_run(0)
    assert run is not None
    assert (
        run.num_turns == 18
    )  # of 20 tokens the first is there, and the last slot is launched by the last turn but one
    with pytest.raises(ValueError, match="18 are decided"):
        replica.scheduler.take_run(run, [Turn(0.0, 0.0, 0.0)] * 19, 0)
