"""Simulations of random loads: shared prefixes, little KV, windows, paces, routers, replicas. They are held against the
real Engine on the same virtual clock, where every request has the same story, token by token; and against themselves,
with every step decided by itself."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from tests.planner.test_simulate import felt, timings_of, timings_of_the_engine
from tests.properties import examples

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.step import Step
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape, ModelShape
from twostroke.cost.step_cost import StepCost
from twostroke.planner import simulate as simulation
from twostroke.planner.report import SimulationReport
from twostroke.planner.simulate import ROUTERS, Prompts, Replica, ReplicaSpec, simulate
from twostroke.planner.trace import TraceRequest
from twostroke.scheduling.config import SchedulerConfig

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


@examples(60)
@given(specs(), traces())
def test_every_request_has_the_same_story(spec: ReplicaSpec, trace: list[TraceRequest]) -> None:
    replica = Replica(spec)
    found, expected = timings_of(replica, trace), timings_of_the_engine(spec, trace).values()
    assert sorted(map(felt, found)) == sorted(map(felt, expected))
    assert (len(found), replica.num_unfinished) == (len(trace), 0)


def facts(report: SimulationReport) -> tuple[object, ...]:
    served = report.served
    return (
        sorted(zip(served.ttft_s, served.queue_s, map(str, served.tpot_s), strict=True)),
        sorted(served.itl_s),
        (served.prompt_tokens, served.output_tokens, report.num_refused, report.num_steps, report.num_preemptions),
        (report.prefix_hit_tokens, report.duration_s, report.busy_share),
    )


class StepByStep(Replica):
    """The slow twin."""

    def _next_glide(self) -> None:
        return None


@examples(40)
@given(specs(), traces(), st.integers(1, 3), st.sampled_from(ROUTERS), st.booleans())
def test_turns_told_together_change_nothing_to_the_last_bit(
    spec: ReplicaSpec, trace: list[TraceRequest], replicas: int, router: str, is_slow_host: bool
) -> None:
    if is_slow_host:
        spec = replace(spec, host_s=3e-4, newcomer_s=7e-4, newcomer_s_per_token=1e-5)
    quick = simulate(spec, trace, replicas=replicas, router=router)
    with patch.object(simulation, "Replica", StepByStep):
        slow = simulate(spec, trace, replicas=replicas, router=router)
    assert facts(quick) == facts(slow)


@examples(40)
@given(specs(), traces())
def test_the_scheduler_and_its_ledger_end_as_step_by_step(spec: ReplicaSpec, trace: list[TraceRequest]) -> None:
    quick, slow = Replica(spec), StepByStep(spec)
    found, expected = timings_of(quick, trace), timings_of(slow, trace)
    assert sorted(map(felt, found)) == sorted(map(felt, expected))
    for replica in (quick, slow):
        replica.scheduler.check()
    assert quick.scheduler.counts() == slow.scheduler.counts()
    assert (quick.num_steps, quick.busy_s, quick.now_s) == (slow.num_steps, slow.busy_s, slow.now_s)


SHAPE = ModelShape(8 * 10**9, 7 * 10**9, 5 * 10**8, 15 * 10**9, 32, 128, (KVGroupShape(16, None, 65_536),))


def replica_with(num_blocks: int) -> Replica:
    layout = KVLayout(16, (KVGroup((0,), None, num_blocks),))
    return Replica(ReplicaSpec(StepCost(SHAPE, CEILINGS).seconds, SHAPE, CEILINGS, SchedulerConfig(150), layout))


def test_some_of_them_preempt() -> None:
    """That the test above has something to compare."""
    replica = replica_with(24)
    timings_of(replica, [TraceRequest(0.01 * number, 60, 60) for number in range(10)])
    assert replica.scheduler.counts().preemptions > 0


def test_turns_in_which_nothing_else_happens_are_told_together() -> None:
    """Each is timed, and the scheduler decides far fewer."""
    replica, num_decided = replica_with(1000), 0
    schedule = replica.scheduler.schedule

    def counted(now_s: float) -> Step | None:
        nonlocal num_decided
        num_decided += 1
        return schedule(now_s)

    replica.scheduler.schedule = counted  # type: ignore[method-assign]
    (timing,) = timings_of(replica, [TraceRequest(0.0, 10, 100)])
    assert replica.num_steps == 100 and num_decided < 10
    assert len(set(timing.token_times_s)) == 100
    assert timing.token_times_s == sorted(timing.token_times_s)


def test_streams_are_steady_while_steps_hold_nothing_but_a_slot_of_each() -> None:
    replica, prompts = replica_with(1000), Prompts()
    scheduler = replica.scheduler
    assert scheduler.steady_streams() == []
    replica.add(prompts.request(TraceRequest(0.0, 10, 20)))
    assert scheduler.steady_streams() == [], "it waits"
    replica.step()
    (stream,) = scheduler.steady_streams()
    replica.add(prompts.request(TraceRequest(0.0, 10, 5)))
    assert scheduler.steady_streams() == [], "one more may join"
    replica.step()
    replica.step()
    assert len(scheduler.steady_streams()) == 2
    while stream.max_total_tokens - 1 > stream.next_position:
        replica.step()
    assert scheduler.steady_streams() == [], "its last token is in flight"
