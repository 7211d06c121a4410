"""Medians, the best peer, and what noise does to both."""

import pytest

from bench.peers.guard import Disturbance
from bench.peers.metrics import METRICS
from bench.peers.summary import Sample, lead_over, spread_of, summarise

QUIET = Disturbance(0.0, 0.0, 1.0)
NOISY = Disturbance(0.5, 0.0, 1.0)
DECODE = next(metric for metric in METRICS if metric.key == "w1.decode_tokens_per_s")
HIT = next(metric for metric in METRICS if metric.key == "w4.hit_ttft_ms")


def sample(engine, value, disturbance=QUIET, metric=DECODE):
    return Sample(engine, metric.workload, 0, 0, {metric.name: value}, disturbance)


def test_noisy_samples_are_left_out_while_there_is_a_clean_one():
    spread = spread_of([sample("a", 10.0), sample("a", 30.0), sample("a", 20.0), sample("a", 1.0, NOISY)], DECODE)
    assert (spread.median, spread.minimum, spread.maximum, spread.count, spread.noisy) == (20.0, 10.0, 30.0, 3, False)


def test_without_a_clean_sample_the_noisy_ones_stand_and_are_marked():
    spread = spread_of([sample("a", 1.0, NOISY), sample("a", 3.0, NOISY)], DECODE)
    assert (spread.median, spread.count, spread.noisy) == (2.0, 2, True)
    assert spread_of([sample("a", 1.0)], HIT) is None


@pytest.mark.parametrize(
    ("disturbance", "noisy"),
    [
        (Disturbance(0.0, 0.0, 1.0), False),
        (Disturbance(0.05, 0.0, 1.1), False),
        (Disturbance(0.05, 0.05, 1.0), True),
        (Disturbance(0.0, 0.0, 1.5), True),
    ],
)
def test_what_counts_as_noise(disturbance, noisy):
    assert disturbance.is_noisy is noisy


def test_the_lead_is_over_the_best_peer_or_the_best_of_some():
    spreads = summarise([sample("us", 300.0), sample("fast", 150.0), sample("fair", 100.0)])[DECODE.key]
    lead = lead_over(DECODE, spreads, "us")
    assert (lead.peer, lead.times) == ("fast", pytest.approx(2.0))
    lead = lead_over(DECODE, spreads, "us", ["fair"])
    assert (lead.peer, lead.times) == ("fair", pytest.approx(3.0))
    assert lead_over(DECODE, spreads, "us", ["us"]) is None


def test_for_a_time_the_best_peer_is_the_quickest():
    found = [sample(engine, value, metric=HIT) for engine, value in (("us", 20.0), ("a", 60.0), ("b", 50.0))]
    lead = lead_over(HIT, summarise(found)[HIT.key], "us")
    assert (lead.peer, lead.times) == ("b", pytest.approx(2.5))
