"""A simulated fleet against the simulation of one pool, against arithmetic by hand, and against what always holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.planner.test_simulate import COST, SHAPE, SPEC
from tests.properties import examples

from twostroke.core.errors import BadRequestError
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.service_level import DEFAULT_LEVEL, ServiceLevel, ServiceLevels
from twostroke.cost.floor import StepWork
from twostroke.cost.model_shape import KVGroupShape
from twostroke.planner.fleet.fleet import Fleet, simulate_fleet
from twostroke.planner.fleet.link import Link, find_link, handoff_bytes
from twostroke.planner.fleet.member import FleetReplica, Member
from twostroke.planner.fleet.report import FleetReport
from twostroke.planner.fleet.routing import Choice, Router
from twostroke.planner.fleet.spec import Failure, FleetSpec, PoolLook
from twostroke.planner.simulate import Prompts, ReplicaSpec, simulate
from twostroke.planner.trace import Lengths, TraceRequest, bursts, poisson

KV_BYTES = 131_072
"""Of a token."""
FAST, SLOW = Link(100e9, "fast", 1e-4, is_early=True), Link(1e9, "slow", 1e-4, is_early=True)
LATE = replace(SLOW, is_early=False)
MIXED = bursts(30.0, 60, Lengths(20, 900), Lengths(2, 60), burst=3)


def two_pools(prefill: int = 1, decode: int = 1, link: Link = FAST, **more: object) -> FleetSpec:
    return FleetSpec(SPEC, decode, prefill, link, "least-backlog", **{"may_stay": False, **more})  # type: ignore[arg-type]


def num_over(report: FleetReport) -> int:
    simulation = report.simulation
    return len(report.felt.ttft_s) + simulation.num_refused + simulation.num_late + report.num_broken


# One pool


@pytest.mark.parametrize("router", ["least-loaded", "round-robin"])
def test_one_pool_is_what_a_simulation_of_replicas_is(router: str) -> None:
    plain = simulate(SPEC, MIXED, replicas=3, router=router)
    fleet = simulate_fleet(FleetSpec(SPEC, decode=3, router=router), MIXED).simulation
    for name in ("ttft_s", "itl_s", "queue_s"):
        assert sorted(getattr(fleet.served, name)) == sorted(getattr(plain.served, name))
    assert (fleet.num_steps, fleet.duration_s) == (plain.num_steps, plain.duration_s)
    assert fleet.busy_share == pytest.approx(plain.busy_share)


def test_within_a_tick_replicas_go_on_alone_and_the_same_comes_of_it_but_for_who_is_chosen() -> None:
    exact = simulate_fleet(two_pools(2, 2), MIXED)
    ticking = simulate_fleet(two_pools(2, 2, tick_s=0.05), MIXED)
    assert len(ticking.felt.ttft_s) == len(exact.felt.ttft_s) == 60
    assert ticking.simulation.ttft_s["p50"] == pytest.approx(exact.simulation.ttft_s["p50"], rel=0.3)
    # Where nobody has to be chosen, nothing differs.
    exact, ticking = (simulate_fleet(two_pools(tick_s=tick_s), MIXED) for tick_s in (0.0, 0.05))
    assert sorted(ticking.felt.ttft_s) == pytest.approx(sorted(exact.felt.ttft_s))


def test_prompts_that_begin_alike_go_where_their_beginning_is() -> None:
    turns = []
    for number in range(51):  # conversations of four turns, each with what was said before
        for turn in range(4):
            said = 160 * turn
            turns.append(TraceRequest(0.9 * turn + 0.017 * number, said + 100, 10, f"talk-{number}", said + 64))
    turns.sort(key=lambda one: one.arrival_s)
    roomy = replace(SPEC, layout=KVLayout(16, (KVGroup(tuple(range(32)), None, 6000),)))
    alone = simulate(roomy, turns).prefix_hit_tokens
    by_prefix = simulate_fleet(FleetSpec(roomy, decode=2, router="prefix"), turns).simulation.prefix_hit_tokens
    in_turn = simulate_fleet(FleetSpec(roomy, decode=2, router="round-robin"), turns).simulation.prefix_hit_tokens
    assert alone > 0 and by_prefix >= 0.8 * alone
    assert by_prefix > in_turn


# Two pools


def test_a_handoff_by_hand() -> None:
    """600 tokens in chunks of 512 and 88. The first chunk's KV travels while the second is read. Of 37 full blocks the
    writer gets all, and reads the eight tokens behind them."""
    report = simulate_fleet(two_pools(), [TraceRequest(3.0, 600, 4)])
    read_s = [COST.seconds(StepWork(((0, 512),))), COST.seconds(StepWork(((512, 88),), 1))]
    last_s = 1e-4 + 80 * KV_BYTES / 100e9
    first_step_s = COST.seconds(StepWork(((592, 8),), 1))
    assert read_s[1] > 512 * KV_BYTES / 100e9
    assert report.simulation.ttft_s["p50"] == pytest.approx(sum(read_s) + last_s + first_step_s)
    gaps_s = [COST.seconds(StepWork(contexts=[context])) for context in (601, 602, 603)]
    assert list(report.simulation.served.itl_s) == pytest.approx(gaps_s)
    handoffs = report.handoffs
    assert (handoffs.number, handoffs.num_bytes) == (1, 592 * KV_BYTES)
    assert handoffs.exposed_s["p50"] == pytest.approx(last_s)
    assert handoffs.link_s["p50"] == pytest.approx(2e-4 + 592 * KV_BYTES / 100e9)
    assert report.simulation.queue_s["p50"] == 0.0 and report.simulation.prefix_hit_tokens == 0


def test_a_slow_link_hides_nothing_but_the_time_that_was_read() -> None:
    report = simulate_fleet(two_pools(link=SLOW), [TraceRequest(0.0, 600, 2)])
    second_s = COST.seconds(StepWork(((512, 88),), 1))
    whole_s = 2e-4 + 592 * KV_BYTES / 1e9
    assert report.handoffs.exposed_s["p50"] == pytest.approx(whole_s - second_s)


def test_where_nothing_goes_early_a_first_token_waits_for_all_of_it_and_for_one_latency() -> None:
    report = simulate_fleet(two_pools(link=LATE), [TraceRequest(3.0, 600, 4)])
    read_s = COST.seconds(StepWork(((0, 512),))) + COST.seconds(StepWork(((512, 88),), 1))
    whole_s = 1e-4 + 592 * KV_BYTES / 1e9
    for seconds in (report.handoffs.exposed_s, report.handoffs.link_s):
        assert seconds["p50"] == pytest.approx(whole_s)
    assert report.handoffs.hidden_share == pytest.approx(0.0, abs=1e-9) and report.handoffs.num_bytes == 592 * KV_BYTES
    first_step_s = COST.seconds(StepWork(((592, 8),), 1))
    assert report.simulation.ttft_s["p50"] == pytest.approx(read_s + whole_s + first_step_s)


@pytest.mark.parametrize(("link", "num_exposed"), [(LATE, 592), (FAST, 80)], ids=["late", "early"])
def test_a_router_expects_the_handoff_that_comes(link: Link, num_exposed: int) -> None:
    asked, router = TraceRequest(0.0, 593, 4), Router(SPEC, "least-backlog")
    reads, writes = (Member(number, role, FleetReplica(SPEC)) for number, role in enumerate(("prefill", "decode")))
    expected_s = Choice(SPEC, link, router).handoff_s(reads, writes, asked, 0.0)
    read_s = COST.seconds(StepWork(((0, 512),))) + COST.seconds(StepWork(((512, 81),), 1))
    [ttft_s] = simulate_fleet(two_pools(link=link), [asked]).felt.ttft_s
    exposed_s = 1e-4 + num_exposed * KV_BYTES / link.bytes_per_s
    assert ttft_s - read_s == pytest.approx(exposed_s + COST.seconds(StepWork(((592, 1),), 1)))
    if link is LATE:
        assert expected_s == pytest.approx(ttft_s - read_s, rel=0.01)
    else:
        assert expected_s > ttft_s - read_s, "it takes the last step for a full one"


def test_transfers_of_a_replica_follow_each_other() -> None:
    trace = [TraceRequest(0.0, 100, 2), TraceRequest(0.0, 100, 2)]  # both are read in the same step
    report = simulate_fleet(two_pools(1, 2, SLOW), trace)
    each_s = 1e-4 + 96 * KV_BYTES / 1e9
    assert report.handoffs.exposed_s["p50"] == pytest.approx(2 * each_s)
    apart = simulate_fleet(two_pools(2, 2, SLOW), trace)
    assert apart.handoffs.exposed_s["p99"] == pytest.approx(each_s)


def test_what_a_writer_has_is_not_sent_again() -> None:
    trace = [TraceRequest(float(second), 640, 2, "system", 320) for second in range(3)]
    report = simulate_fleet(two_pools(), trace)
    assert report.handoffs.num_bytes == (624 + 2 * (624 - 320)) * KV_BYTES
    assert report.simulation.prefix_hit_tokens == 2 * 320  # the reader's: what was handed over is no hit


def test_of_a_window_the_last_positions_travel() -> None:
    shape = replace(SHAPE, kv_groups=(KVGroupShape(16, None, 1000), KVGroupShape(16, 128, 10)))
    assert handoff_bytes(shape, 0, 500, 500) == 500 * 1000 + 127 * 10
    assert handoff_bytes(shape, 0, 300, 500) == 300 * 1000
    assert handoff_bytes(shape, 400, 500, 500) == 100 * 1000 + 100 * 10
    # Pools of windows are small: what comes is taken in as the window moves on.
    layout = KVLayout(16, (KVGroup(tuple(range(16)), None, 2000), KVGroup(tuple(range(16, 32)), 128, 60)))
    windowed = replace(SPEC, shape=shape, layout=layout)
    fleet = Fleet(replace(two_pools(), replica=windowed))
    report = fleet.serve([TraceRequest(0.1 * number, 2000, 5) for number in range(4)])
    fleet.check()
    assert len(report.felt.ttft_s) == 4 and report.handoffs.num_lost == 0


STATES = replace(SHAPE, kv_groups=(KVGroupShape(16, None, 1000), KVGroupShape(16, 1, 7_000_000, "state")))
"""As the shapes of families have them: to the cost a state is a window of one token."""


def with_states(num_blocks: int = 2000, num_slots: int = 40) -> ReplicaSpec:
    groups = KVGroup(tuple(range(16)), None, num_blocks), KVGroup(tuple(range(16, 32)), None, num_slots, "state")
    return replace(SPEC, shape=STATES, layout=KVLayout(16, groups))


def test_states_travel_once_as_they_are_behind_the_last_whole_block() -> None:
    assert handoff_bytes(STATES, 0, 496, 496) == 496 * 1000 + 7_000_000
    assert handoff_bytes(STATES, 0, 256, 496) == 256 * 1000
    assert handoff_bytes(STATES, 256, 496, 496) == 240 * 1000 + 7_000_000
    assert handoff_bytes(STATES, 496, 496, 496) == 0


def test_a_handoff_with_states_by_hand() -> None:
    """600 tokens in chunks of 512, 80 and 8: the second ends where the states are kept. The writer reads eight."""
    trace = [TraceRequest(3.0, 600, 4), TraceRequest(9.0, 600, 4)]
    fleet = Fleet(replace(two_pools(), replica=with_states()))
    report = fleet.serve(trace)
    fleet.check()
    handoffs = report.handoffs
    assert (handoffs.number, handoffs.num_lost) == (2, 0)
    assert handoffs.num_bytes == 2 * (592 * 1000 + 7_000_000)
    chunks = StepWork(((0, 512),)), StepWork(((512, 80),)), StepWork(((592, 8),), 1)
    last_s = 1e-4 + (80 * 1000 + 7_000_000) / 100e9
    read_s = sum(map(COST.seconds, chunks))
    exposed_s = max(0.0, last_s - COST.seconds(chunks[2]))
    first_s = COST.seconds(StepWork(((592, 8),), 1))
    assert report.felt.ttft_s[0] == pytest.approx(read_s + exposed_s + first_s)


def test_writers_with_few_slots_for_states_serve_everybody() -> None:
    trace = bursts(25.0, 40, Lengths(5, 800), Lengths(1, 40), burst=5, seed=4)
    for slots in (6, 40):
        fleet = Fleet(replace(two_pools(1, 2), replica=with_states(300, slots)))
        report = fleet.serve(trace)
        fleet.check()
        assert num_over(report) == len(trace)


def test_gaps_are_even_where_nobody_reads() -> None:
    trace = poisson(12.0, 80, Lengths(1000, 3000), Lengths(40, 80))
    one = simulate(replace(SPEC, levels=ServiceLevels()), trace, replicas=2)
    two = simulate_fleet(two_pools(1, 1), trace).simulation
    assert two.itl_s["p99"] < 0.6 * one.itl_s["p99"]


def test_short_prompts_and_prefix_hits_stay_and_long_ones_do_not() -> None:
    busy = [TraceRequest(0.0, 400, 300)] * 4
    short = simulate_fleet(two_pools(may_stay=True), [*busy, TraceRequest(1.0, 20, 2)])
    long = simulate_fleet(two_pools(may_stay=True), [*busy, TraceRequest(1.0, 3000, 2)])
    assert short.handoffs.number == long.handoffs.number - 1
    assert short.handoffs.num_kept == long.handoffs.num_kept + 1
    # The same beginning again: what is left of it is short.
    first = [*busy, TraceRequest(1.0, 3000, 2, "document", 2944)]
    again = simulate_fleet(two_pools(may_stay=True), [*first, TraceRequest(3.0, 3000, 2, "document", 2944)])
    assert again.handoffs.num_kept == long.handoffs.num_kept + 1


def test_a_promised_gap_keeps_prompts_away_from_streams() -> None:
    promising = replace(SPEC, levels=ServiceLevels((ServiceLevel(DEFAULT_LEVEL, ttft_s=5.0, itl_s=0.007),)))
    trace = [*([TraceRequest(0.0, 400, 300)] * 4), TraceRequest(1.0, 400, 2)]
    kept = {
        name: simulate_fleet(replace(two_pools(may_stay=True), replica=spec), trace).handoffs.num_kept
        for name, spec in (("plain", replace(SPEC, itl_target_s=1.0)), ("promising", promising))
    }
    assert kept["promising"] < kept["plain"]


def test_a_full_writer_reads_again_and_everybody_is_served() -> None:
    small = replace(SPEC, layout=KVLayout(16, (KVGroup(tuple(range(32)), None, 70),)))
    fleet = Fleet(replace(two_pools(2, 1), replica=small))
    report = fleet.serve(bursts(40.0, 40, Lengths(100, 700), Lengths(20, 60), burst=8))
    fleet.check()
    assert report.handoffs.num_lost > 0 and len(report.felt.ttft_s) == 40


# Replicas that come and go


def test_requests_of_a_reader_that_fails_are_sent_again_and_none_is_lost() -> None:
    trace = bursts(40.0, 40, Lengths(400, 900), Lengths(10, 30), burst=10)
    spec = two_pools(2, 2, failures=(Failure(trace[10].arrival_s + 0.02, "prefill", 0),), start_s=0.5)
    fleet = Fleet(spec)
    report = fleet.serve(trace)
    fleet.check()
    assert (report.num_failures, report.num_broken) == (1, 0)
    assert report.num_sent_again > 0 and len(report.felt.ttft_s) == 40


def test_a_writer_that_fails_breaks_the_answers_in_their_midst_alone() -> None:
    trace = bursts(40.0, 40, Lengths(400, 900), Lengths(100, 200), burst=10)
    spec = two_pools(2, 2, failures=(Failure(trace[20].arrival_s + 0.1, "decode", 0),), start_s=0.5)
    fleet = Fleet(spec)
    report = fleet.serve(trace)
    fleet.check()
    assert report.num_broken > 0 and len(report.felt.ttft_s) == 40 - report.num_broken
    assert report.kept_share < 1.0


def test_the_only_writer_fails_and_requests_wait_for_the_next() -> None:
    trace = [TraceRequest(0.0, 200, 2), TraceRequest(2.0, 200, 2)]
    spec = FleetSpec(SPEC, decode=1, failures=(Failure(1.0, "decode", 0),), start_s=3.0, look_s=0.25)
    report = simulate_fleet(spec, trace)
    assert len(report.felt.ttft_s) == 2
    assert max(report.felt.ttft_s) >= 2.0  # 4.0, when the next is there, less 2.0, when it came


def test_the_share_of_the_time_that_is_read_is_counted_as_it_passes() -> None:
    """Steps of 3 s are more than what is looked at: a replica that reads half of the time says so at every look."""
    replica = FleetReplica(replace(SPEC, step_seconds=lambda work: 3.0 if work.chunks else 0.5, run_ahead=False))
    prompts, busy, marks = Prompts(), [], [replica.totals_at(0.0)]
    for moment_s in range(48):
        if moment_s % 6 == 0:
            replica.add(prompts.request(TraceRequest(float(moment_s), 100, 1)))
        replica.play_until(moment_s + 1.0)
        marks.append(replica.totals_at(moment_s + 1.0))
        if moment_s >= 11:
            busy.append(marks[-1].since(marks[-13]).reading_s / 12.0)
    assert busy == pytest.approx([0.5] * len(busy))


def test_a_pool_follows_its_scaler_and_whoever_drains_ends_its_work() -> None:
    asked: list[tuple[float, int]] = []

    def scaler(now_s: float, looks: dict[str, PoolLook]) -> dict[str, tuple[int, str]]:
        asked.append((now_s, len(looks["decode"].replicas)))
        return {"prefill": (1, ""), "decode": (3 if now_s < 4.0 else 1, "as it was told")}

    trace = poisson(20.0, 160, Lengths(100, 400), Lengths(50, 100))
    fleet = Fleet(two_pools(1, 1, look_s=1.0, start_s=1.0), scaler)  # type: ignore[arg-type]
    report = fleet.serve(trace)
    fleet.check()
    assert len(report.felt.ttft_s) == 160 and report.num_broken == 0
    assert max(number for _, number in asked) == 3 and asked[-1][1] == 1
    assert {one.decode for one in report.moments} >= {1, 3}
    duration_s = report.simulation.duration_s
    assert report.replica_s["prefill"] == pytest.approx(duration_s)
    assert duration_s < report.replica_s["decode"] < 3 * duration_s


@pytest.mark.hypothesis
@given(
    seed=st.integers(0, 10**6),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    blocks=st.sampled_from([60, 150, 2000]),
    tick_s=st.sampled_from([0.0, 0.03]),
    router=st.sampled_from(["least-loaded", "round-robin", "least-backlog", "prefix"]),
    may_stay=st.booleans(),
    num_failures=st.integers(0, 2),
)
@examples(25)
def test_whatever_happens_every_request_is_over_once_and_no_block_is_lost(
    seed: int, prefill: int, decode: int, blocks: int, tick_s: float, router: str, may_stay: bool, num_failures: int
) -> None:
    trace = bursts(25.0, 25, Lengths(5, 800), Lengths(1, 40), burst=5, seed=seed)
    trace = [replace(one, prefix="a", prefix_tokens=min(200, one.prompt_tokens)) for one in trace[::2]] + trace[1::2]
    trace.sort(key=lambda one: one.arrival_s)
    failures = tuple(
        Failure(trace[8 + 7 * number].arrival_s + 0.01, "prefill" if prefill and seed % 2 else "decode", seed)
        for number in range(num_failures)
    )
    small = replace(SPEC, layout=KVLayout(16, (KVGroup(tuple(range(32)), None, blocks),)))
    link = (SLOW, FAST, LATE)[seed % 3]
    spec = FleetSpec(
        small, decode, prefill, link, router, may_stay, tick_s, start_s=0.3, look_s=0.2, failures=failures, seed=seed
    )
    fleet = Fleet(spec)
    report = fleet.serve(trace)
    fleet.check()
    assert num_over(report) == len(trace)
    assert min(report.felt.ttft_s, default=1.0) > 0.0
    again = simulate_fleet(spec, trace)
    assert list(again.felt.ttft_s) == list(report.felt.ttft_s), "the same fleet does the same"


# What is asked


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [("50", 50.0), ("12.5GB/s", 12.5), ("400Gbit", 50.0), ("100 gbps", 100.0), ("ndr", 50.0), ("100GbE", 12.5)],
)
def test_links_by_number_and_by_name(text: str, gigabytes: float) -> None:
    assert find_link(text).bytes_per_s == pytest.approx(gigabytes * 1e9)


def test_a_devices_own_link() -> None:
    assert find_link("h200").bytes_per_s == 450e9
    assert find_link("h200").times(2).bytes_per_s == 900e9
    for text in ("0", "-1", "nothing", "m4max", "1e9", ""):
        with pytest.raises(BadRequestError):
            find_link(text)


def test_senseless_fleets_are_refused() -> None:
    uncached = replace(SPEC, scheduler=replace(SPEC.scheduler, prefix_caching=False))
    for wrong in (
        lambda: FleetSpec(SPEC, decode=0),
        lambda: FleetSpec(SPEC, 1, 1),
        lambda: FleetSpec(SPEC, router="best"),
        lambda: FleetSpec(uncached, 1, 1, FAST),
    ):
        with pytest.raises(BadRequestError):
            wrong()
    assert simulate_fleet(FleetSpec(SPEC), []).simulation.duration_s == 0.0
