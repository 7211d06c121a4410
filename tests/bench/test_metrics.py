"""Token times to columns, by hand-made numbers."""

import pytest

from bench.peers.metrics import METRICS, Output, read_off
from bench.peers.workloads import Workload


def output(*times_s):
    return Output(tuple(range(len(times_s))), times_s)


def test_one_request_splits_into_its_two_phases():
    workload = Workload("w1", "", (100, 100), 3)
    values = read_off(workload, [[0] * 100], [output(0.5, 0.6, 0.7)])
    assert values["prefill_tokens_per_s"] == pytest.approx(200.0)
    assert values["decode_tokens_per_s"] == pytest.approx(10.0)


def test_a_batch_counts_all_tokens_until_the_last_one_is_done():
    workload = Workload("w3", "", (1, 4), 2, num_requests=3)
    values = read_off(workload, [[0]] * 3, [output(1.0, 2.0), output(2.0, 4.0), output(3.0, 3.5)])
    assert values["output_tokens_per_s"] == pytest.approx(6 / 4.0)
    assert values["ttft_p50_s"] == pytest.approx(2.0)


def test_hits_leave_out_the_request_that_paid_for_the_prefix():
    workload = Workload("w4", "", (1, 1), 1, num_requests=3, at_once=False, shared_prefix_tokens=8)
    values = read_off(workload, [[0]] * 3, [output(9.0), output(0.010), output(0.030)])
    assert values["hit_ttft_ms"] == pytest.approx(20.0)
    assert values["miss_ttft_ms"] == pytest.approx(9000.0)


def test_an_answer_of_the_wrong_length_is_refused():
    workload = Workload("w1", "", (100, 100), 3)
    with pytest.raises(ValueError, match="3 tokens were asked for and 2 came"):
        read_off(workload, [[0] * 100], [output(0.5, 0.6)])
    with pytest.raises(ValueError, match="all tokens came at once"):
        read_off(workload, [[0] * 100], [output(0.5, 0.5, 0.5)])
    with pytest.raises(ValueError, match="1 answers were asked for and 0 came"):
        read_off(workload, [[0] * 100], [])


def test_a_lead_above_one_is_better_whichever_way_the_metric_points():
    rate = next(metric for metric in METRICS if metric.key == "w1.decode_tokens_per_s")
    time = next(metric for metric in METRICS if metric.key == "w4.hit_ttft_ms")
    assert rate.lead(200.0, 100.0) == pytest.approx(2.0)
    assert time.lead(20.0, 40.0) == pytest.approx(2.0)
