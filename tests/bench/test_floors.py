"""What the ceilings allow each workload, against arithmetic done by hand on a model of round numbers."""

from dataclasses import replace

import pytest

from bench.peers.floors import best_values
from bench.peers.workloads import FULL, Workload
from tests.cost.shapes import ROUND
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import KVGroupShape

NO_KV = replace(ROUND, head_matmul_parameters=100, weight_bytes_per_step=500, kv_groups=(KVGroupShape(0, None, 0),))
WITH_KV = replace(NO_KV, kv_groups=(KVGroupShape(num_layers=3, window=None, bytes_per_token=10),))


def ceilings(read, multiply_adds):
    return Ceilings(read, multiply_adds, "made up")


def test_one_request_is_bound_by_arithmetic_then_by_bytes():
    workload = Workload("w1", "", (10, 10), 5)
    best = best_values(NO_KV, ceilings(1000.0, 10_100.0), workload)
    assert best["prefill_tokens_per_s"] == pytest.approx(10 / (10_100 / 10_100.0))
    assert best["decode_tokens_per_s"] == pytest.approx(1000.0 / 500)


def test_a_hit_pays_for_its_own_tokens_alone():
    workload = Workload("w4", "", (10, 10), 5, num_requests=2, at_once=False, shared_prefix_tokens=100)
    assert best_values(NO_KV, ceilings(1e9, 10_100.0), workload)["hit_ttft_ms"] == pytest.approx(1000.0)


def test_a_batch_reads_the_weights_once_a_step_for_all():
    workload = Workload("w3", "", (1, 1), 2, num_requests=4)
    # The arithmetic costs nothing: four prompts read the weights once each, one step reads them once for four tokens.
    best = best_values(NO_KV, ceilings(500.0, 1e15), workload)
    assert best["output_tokens_per_s"] == pytest.approx(8 / 5.0)
    # The bytes cost nothing: 4 x 1100 for the prompts, 4 x 1100 for the step.
    best = best_values(NO_KV, ceilings(1e15, 1100.0), workload)
    assert best["output_tokens_per_s"] == pytest.approx(8 / 8.0)


def test_attention_and_kv_count():
    for workload in FULL:
        bare, full = (best_values(shape, ceilings(1e6, 1e6), workload) for shape in (NO_KV, WITH_KV))
        for name, value in full.items():
            assert value > bare[name] if name.endswith("_ms") else value < bare[name]
