"""Terms by hand, and the errors that the efficiencies state, worked out from the records in bench/results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench.plan_error import MODELS, Point, fit, mean_error, read_points
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.floor import StepWork, step_floor_s
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.cost.roofline import decode_work, prefill_work
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import CPU_RECORDS, H200_RECORDS, Floor, FloorShares, TermEfficiency, expected

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
H200 = find_device("h200").ceilings("bf16")
ALL = TermEfficiency("", "", *(1.0,) * 6, *(0.0,) * 3)


def dimensions(name: str) -> Dimensions:
    return dimensions_from_config(KNOWN_SHAPES[name].config)


LLAMA_8B = dimensions("Llama-3.1-8B").shape(weight_bits=16, kv_bits=16)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return read_points()


def test_the_records_are_read(points: list[Point]) -> None:
    assert len(points) == 22
    assert {point.model for point in points} == set(MODELS)
    found = {(point.model, point.figure, point.name): point.measured for point in points}
    assert found["8B", "decode step", "256 streams at 800"] == pytest.approx(14.91e-3)
    assert found["8B", "TTFT", "16384 tokens"] == pytest.approx(0.480)  # the median of 480, 471 and 484 ms
    assert found["0.6B", "TPOT", "512 in, 256 out"] == pytest.approx(0.6595e-3)  # of 674, 660, 659 and 657 us
    assert found["8B", "tokens/s", "128 x 1024 in, 256 out"] == pytest.approx(5479)


def test_every_error_that_is_stated_is_the_measured_one(points: list[Point]) -> None:
    stated = H200_RECORDS.error
    assert f"{mean_error(points, H200_RECORDS):.1%} on average over {len(points)} figures" in stated
    for figure in {point.figure for point in points}:
        some = [point for point in points if point.figure == figure]
        assert f"{figure} {mean_error(some, H200_RECORDS):.1%}" in stated
    worst = max(abs(point.error(H200_RECORDS)) for point in points)
    assert f"worst {worst:.0%}" in stated
    # All but that one, a small model's eight streams, are within 15%.
    assert sorted(abs(point.error(H200_RECORDS)) for point in points)[-2] < 0.15


@pytest.mark.parametrize("left_out", list(MODELS))
def test_a_model_that_was_left_out_of_the_fit(points: list[Point], left_out: str) -> None:
    start = replace(H200_RECORDS, matmul=0.7, weight_reads=0.8, kv_reads=0.8, layer_s=1e-5)
    others = fit([point for point in points if point.model != left_out], start)
    error = mean_error([point for point in points if point.model == left_out], others)
    low, high = map(float, re.findall(r"(\d+)% to (\d+)% on a model", H200_RECORDS.error)[0])
    assert low - 1.5 <= 100 * error <= high + 1.5


def test_the_kv_space_that_the_engine_found_on_an_h200() -> None:
    """What the records' engines say of it: 14,844, 18,984 and 13,059 blocks of 64 tokens."""
    text = (RESULTS / "cuda-bench.txt").read_text()
    for model, folder in (("Llama-3.1-8B", "8b"), ("Qwen3-0.6B", "0.6b"), ("Qwen3-30B-A3B", "a3b")):
        section = re.search(rf"shapes/[\w.-]*{folder}: ready.*?KV \d+ blocks of 64 tokens, (\d+) MB", text, re.S)
        assert section is not None
        planned = Deployment(model, dimensions(model), find_device("h200")).kv_space_bytes
        assert planned == pytest.approx(float(section[1]) * 1e6, rel=0.01)


def test_attention_and_experts_are_as_recorded() -> None:
    attention = re.search(r"^prefill 32768 +([\d.]+)", (RESULTS / "cuda-attention.txt").read_text(), re.M)
    experts = re.search(r"8192 grouped.* (\d+) TFLOP/s .*default", (RESULTS / "cuda-moe.txt").read_text())
    assert attention is not None and experts is not None
    assert H200_RECORDS.prefill_attention == pytest.approx(float(attention[1]) / 989.5, abs=0.01)
    assert H200_RECORDS.expert_matmul == pytest.approx(float(experts[1]) / 989.5, abs=0.01)


def test_the_cpus_shares_are_as_recorded() -> None:
    text = (RESULTS / "cpu-2026-11-15-0806.md").read_text()
    line = next(line for line in text.splitlines() if "fraction of that" in line)
    prefill_1, decode_1, prefill_2, decode_2 = (int(share) / 100 for share in re.findall(r"(\d+)%", line)[:4])
    pairs = [(prefill_1, CPU_RECORDS.prefill), (prefill_2, CPU_RECORDS.prefill)]
    pairs += [(decode_1, CPU_RECORDS.decode), (decode_2, CPU_RECORDS.decode)]
    error = sum(abs(measured / assumed - 1) for measured, assumed in pairs) / 4
    assert f"{error:.0%} on average" in CPU_RECORDS.error


def test_terms_by_hand() -> None:
    # 64 streams at 800: 15.01 GB of weights at 80%, 64 x 800 x 131,072 bytes of KV at 50%, 32 layers of 10 us.
    efficiency = replace(ALL, weight_reads=0.8, kv_reads=0.5, layer_s=10e-6)
    by_hand = LLAMA_8B.weight_bytes_per_step / (0.8 * 4.8e12) + 64 * 800 * 131_072 / (0.5 * 4.8e12) + 32 * 10e-6
    assert efficiency.step_seconds(LLAMA_8B, decode_work(64, 800), H200) == pytest.approx(by_hand)
    # A prompt of 4,096: matrices at 60%, attention at 50%.
    efficiency = replace(ALL, matmul=0.6, prefill_attention=0.5)
    matrices = 4096 * LLAMA_8B.layer_matmul_parameters + LLAMA_8B.head_matmul_parameters
    by_hand = matrices / (0.6 * 989.5e12 / 2) + LLAMA_8B.attention_multiply_adds(0, 4096) / (0.5 * 989.5e12 / 2)
    assert efficiency.step_seconds(LLAMA_8B, prefill_work(4096), H200) == pytest.approx(by_hand)
    # A short one is as slow as its layers can be launched.
    slow = replace(ALL, chunk_layer_s=1e-3)
    assert slow.step_seconds(LLAMA_8B, prefill_work(16), H200) == pytest.approx(32e-3)


def test_nothing_is_faster_than_the_floor() -> None:
    for work in (decode_work(1, 10), decode_work(300, 5000), prefill_work(3), prefill_work(5000, 3000)):
        floor_s = Floor().step_seconds(LLAMA_8B, work, H200)
        assert floor_s == step_floor_s(LLAMA_8B, work, H200)
        assert H200_RECORDS.step_seconds(LLAMA_8B, work, H200) > floor_s
        # With all of every limit the terms still add up where the floor takes the larger: never below it.
        assert ALL.step_seconds(LLAMA_8B, work, H200) >= floor_s * (1 - 1e-9)
    assert H200_RECORDS.step_seconds(LLAMA_8B, StepWork(), H200) == 0.0


def test_shares_of_each_phase() -> None:
    shares = FloorShares("", "", prefill=0.5, decode=0.25)
    mixed = StepWork(chunks=((0, 300),), num_sampling_chunks=1, contexts=(50, 60))
    prefill_s = step_floor_s(LLAMA_8B, StepWork(chunks=((0, 300),), num_sampling_chunks=1), H200)
    decode_s = step_floor_s(LLAMA_8B, StepWork(contexts=(50, 60)), H200)
    assert shares.step_seconds(LLAMA_8B, mixed, H200) == pytest.approx(2 * prefill_s + 4 * decode_s)


def test_distance_from_the_records_is_said() -> None:
    assert expected("H200") is H200_RECORDS
    far = expected("MI300X", tensor_parallel=8, arithmetic="fp8")
    assert far.error.startswith("unknown: no MI300X was measured")
    assert "fp8 arithmetic was not measured" in far.error and "tensor parallelism" in far.error
    assert far.matmul == H200_RECORDS.matmul
