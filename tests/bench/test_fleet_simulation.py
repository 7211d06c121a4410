"""The bench of a thousand replicas, with a few: what it counts adds up, and its options do what they say."""

from __future__ import annotations

import pytest

from bench.fleet_simulation import LEVELS, THIRDS, Surge, by_third, fleet_of, played, record, replica
from twostroke.core.service_level import DEFAULT_LEVEL
from twostroke.cost.floor import StepWork
from twostroke.planner.fleet.report import Felt

SURGE = Surge(replicas=12, duration_s=30.0)


def test_it_begins_with_as_many_as_it_says_and_more_of_them_fail_in_a_larger_fleet() -> None:
    for replicas in (12, 600, 1000):
        surge = Surge(replicas=replicas)
        fleet = fleet_of(surge)
        assert fleet.prefill + fleet.decode == replicas < surge.may_have
        assert len(fleet.failures) == max(1, replicas // 50)
    assert sum(Surge(ahead=1.5).pools) == 1500 and Surge(ahead=1.5).trace() == Surge().trace()
    assert Surge().rate_at(30.0) == 1.5 * Surge().rate_at(20.0) == 1.5 * Surge().rate_at(60.0)


def test_who_was_late_is_counted_by_when_it_came() -> None:
    ttft_s = LEVELS.named(DEFAULT_LEVEL).ttft_s
    assert ttft_s is not None
    felt = Felt()
    for arrival_s, first_s, is_kept in ((1.0, ttft_s, 1), (11.0, ttft_s + 0.1, 0), (12.0, 0.5, 0), (29.0, 9.0, 0)):
        felt.arrival_s.append(arrival_s)
        felt.ttft_s.append(first_s)
        felt.is_kept.append(is_kept)
    assert by_third(SURGE, felt) == {
        "before": {"served": 1, "late": 0, "long_gaps": 0},
        "surge": {"served": 2, "late": 1, "long_gaps": 1},
        "behind": {"served": 1, "late": 1, "long_gaps": 0},
    }


def test_every_promise_is_kept_or_counted_as_broken() -> None:
    trace = SURGE.trace()
    report = played(SURGE, trace)
    found = record(SURGE, trace, report)
    thirds = [found[name] for name in THIRDS]
    num_broken = sum(third["late"] + third["long_gaps"] for third in thirds)
    assert sum(third["served"] for third in thirds) == found["served"] == len(trace) - found["broken"]
    assert found["kept_share"] == pytest.approx((found["served"] - num_broken) / len(trace))
    assert found["surge"]["late"] > found["before"]["late"]


def test_steps_take_so_many_times_what_is_predicted() -> None:
    work = StepWork(((0, 1000),), 1, [500] * 4)
    assert replica(1.5).step_seconds(work) == pytest.approx(1.5 * replica().step_seconds(work))
