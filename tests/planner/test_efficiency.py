"""Terms by hand, and the errors that the efficiencies state, worked out from the records in bench/results."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from bench.form_points import form_points, phases_in
from bench.plan_error import LEAST, MODELS, Point, bench_points, left_out_errors, read_points, sentence, shape_of
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.dimensions import Dimensions
from twostroke.cost.floor import StepWork, step_floor_s
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.cost.model_shape import DecodeWeights, WeightCopies
from twostroke.cost.roofline import decode_work, prefill_work
from twostroke.cost.step_cost import StepCost
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import CPU_RECORDS, H200_RECORDS, Fitted, Floor, FloorShares, Recorded, expected
from twostroke.planner.phases import CHUNK_TOKENS, Phases

RESULTS = Path(__file__).resolve().parents[2] / "bench" / "results"
H200 = find_device("h200").ceilings("bf16")
ALL = Recorded("", "", *(0.0,) * 3, *(1.0,) * 7)


def dimensions(name: str) -> Dimensions:
    return dimensions_from_config(KNOWN_SHAPES[name].config)


LLAMA_8B = dimensions("Llama-3.1-8B").shape(weight_bits=16, kv_bits=16)


@pytest.fixture(scope="module")
def points() -> list[Point]:
    return read_points()


def test_a_record_is_read(tmp_path: Path) -> None:
    """Of runs of one figure the last, with the weights that it read; sizes stand in one run alone."""
    rows = [
        f"== 8B\nworkload   figure   measured   floor   of floor\n"
        f"single     TTFT     {ttft} ms   9.5 ms   66%\n           TPOT      674 µs   3.7 ms   95%\n"
        f"nano       output   133,966 tokens    -    -\nbatch      output   5,735 tok/s   7,240 tok/s   79%\n"
        for ttft in (99.0, 12.0, 14.0, 13.0)
    ]
    sizes = "single: one (prompt_len=512 out_len=256 reps=3)\nbatch: many (n=128 prompt_len=1024 out_len=256)\n"
    packed = "== 8B\n8b: llama, random weights, 15.0 GB a step (11.3 GB of few tokens), on cuda with 16 threads\n"
    plain = "== 8B\n8b: llama, random weights, 15.0 GB a step, on cuda with 16 threads\n"
    rows[-1] = rows[-1].replace("batch", f"{packed}batch")
    (tmp_path / "cuda-bench.txt").write_text(rows[0] + sizes + plain + "".join(rows[1:]))
    step = "rows at context 800: 18.48 ms a step, kernels 18.30 ms\n   14.1 us  1 x  _kernel\n"
    (tmp_path / "cuda-step-profile.txt").write_text(
        f"== profile 30B\n64 {step}decode weights packed: asked for, in 12 bits a weight\n8 {step}== profile 8B\n"
        f"1 {step}"
    )
    points = read_points(tmp_path)
    found = {(point.model, point.figure, point.name): point.measured for point in points}
    assert found == {
        ("30B", "decode step", "64 streams at 800"): pytest.approx(18.48e-3),
        ("30B", "decode step", "8 streams at 800"): pytest.approx(18.48e-3),
        ("8B", "decode step", "1 streams at 800"): pytest.approx(18.48e-3),
        ("8B", "TTFT", "512 tokens"): pytest.approx(13e-3),
        ("8B", "TPOT", "512 in, 256 out"): pytest.approx(0.674e-3),
        ("8B", "tokens/s", "128 x 1024 in, 256 out"): pytest.approx(5735),
    }
    assert [point.name for point in points if point.is_packed] == ["8 streams at 800", "128 x 1024 in, 256 out"]


def test_a_figure_is_predicted_with_the_weights_that_it_was_measured_with(points: list[Point]) -> None:
    """Profiles are older than copies for decode; the last runs have them, and say what a step of few tokens reads."""
    assert {(point.model, point.is_packed) for point in points if "at 800" in point.name} == {
        (model, False) for model in MODELS
    }
    assert {(point.model, point.is_packed) for point in points if point.figure == "TPOT"} == {
        ("8B", True),
        ("0.6B", False),
        ("30B", True),
    }
    text = (RESULTS / "cuda-bench.txt").read_text()
    for model, family in (("8B", "llama"), ("30B", "qwen3_moe")):
        *_, read = re.findall(rf": {family}, .* GB a step \((\S+) GB of few tokens\)", text)
        assert f"{shape_of(model, is_packed=True).dense_bytes_read(1) / 1e9:.1f}" == read
        assert shape_of(model).dense_bytes_read(1) == shape_of(model).weight_bytes_per_step


def percents(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+)%", text)]


def test_every_error_that_is_stated_is_the_measured_one(points: list[Point]) -> None:
    """Within two points, so that another recorded run does not ask for a new sentence; further off it does
    (`python -m bench.plan_error` has it)."""
    assert {point.model for point in points} == set(MODELS) and len(points) >= 22
    measured = sentence(points, H200_RECORDS, left_out_errors(points).values())
    assert re.sub(r"[\d.]+", "", measured) == re.sub(r"[\d.]+", "", H200_RECORDS.error)
    for stated, found in zip(percents(H200_RECORDS.error), percents(measured), strict=True):
        assert stated == pytest.approx(found, abs=2.0), measured


def test_most_figures_are_within_a_fifth(points: list[Point]) -> None:
    """All but eight streams of a 0.6B model. What decode reads in 12 bits is within a tenth."""
    errors = sorted(abs(point.error(H200_RECORDS)) for point in points)
    assert errors[-2] < 0.20 and errors[-1] < 0.35
    packed = [abs(point.error(H200_RECORDS)) for point in points if point.is_packed and point.figure != "TTFT"]
    assert len(packed) == 6 and max(packed) < 0.10


def test_trials_beside_a_run_do_not_count(tmp_path: Path) -> None:
    record, later = RESULTS / "cuda-bench.txt", tmp_path / "cuda-bench.txt"
    line = "single     TTFT                 19.0 ms        13.0 ms        68%"

    def figures(path: Path) -> list[tuple[str, str, str, float]]:
        return [(point.model, point.figure, point.name, point.measured) for point in bench_points(path)]

    for section, counts in (("Old weights: 30B", False), ("30B", True)):
        later.write_text(f"{record.read_text()}\n== {section}\n{line}\n")
        assert (figures(later) != figures(record)) == counts


def test_the_kv_space_that_the_engine_found_on_an_h200() -> None:
    """What the records' engines say of it: 14,844, 18,984 and 13,059 blocks of 64 tokens."""
    text = (RESULTS / "cuda-bench.txt").read_text()
    for model, folder in (("Llama-3.1-8B", "8b"), ("Qwen3-0.6B", "0.6b"), ("Qwen3-30B-A3B", "a3b")):
        section = re.search(rf"shapes/[\w.-]*{folder}: ready.*?KV \d+ blocks of 64 tokens, (\d+) MB", text, re.S)
        assert section is not None
        planned = Deployment(model, dimensions(model), find_device("h200")).kv_space_bytes
        assert planned == pytest.approx(float(section[1]) * 1e6, rel=0.01)


def test_attention_and_experts_are_as_recorded_and_products_no_faster() -> None:
    """The defaults of today, in the last records; of products the peak that an H200 was measured to have."""
    lab = json.loads((RESULTS / "lab-llama-3.1-8b-h200.json").read_text())
    best = H200.multiply_adds_per_s / lab["ceilings"]["multiply_adds_per_s"]
    assert best == pytest.approx(LEAST["matmul"], abs=0.01) and H200_RECORDS.matmul > best
    attention_text, experts_text = ((RESULTS / f"cuda-{name}.txt").read_text() for name in ("attention", "moe"))
    *_, attention = re.findall(r"prefill 32768 .*192 keys, not pinned .* ([\d.]+) TFLOP/s$", attention_text, re.M)
    *_, experts = re.findall(r"8192\*grouped.* (\d+) TFLOP/s .*tiles by default$", experts_text, re.M)
    assert 1 / H200_RECORDS.attention == pytest.approx(float(attention) / 989.5, abs=0.01)
    assert 1 / H200_RECORDS.expert_matmul == pytest.approx(float(experts) / 989.5, abs=0.01)


def test_the_cpus_shares_are_as_recorded() -> None:
    text = (RESULTS / "cpu-2026-11-15-1436.md").read_text()
    line = next(line for line in text.splitlines() if "fraction of that" in line)
    prefill_1, decode_1, prefill_2, decode_2 = (int(share) / 100 for share in re.findall(r"(\d+)%", line)[:4])
    pairs = [(prefill_1, CPU_RECORDS.prefill), (prefill_2, CPU_RECORDS.prefill)]
    pairs += [(decode_1, CPU_RECORDS.decode), (decode_2, CPU_RECORDS.decode)]
    error = sum(abs(measured / assumed - 1) for measured, assumed in pairs) / 4
    assert f"{error:.0%} on average" in CPU_RECORDS.error


def test_the_planner_and_the_engine_have_one_cost_model() -> None:
    works = (decode_work(1, 10), decode_work(300, 5000), prefill_work(3), prefill_work(5000, 3000))
    works += (StepWork(((0, 300), (70, 9)), 1, contexts=(50, 60), queries=(4, 1)),)
    for shape, work in product((LLAMA_8B, shape_of("8B", is_packed=True), shape_of("30B", is_packed=True)), works):
        engine = StepCost(shape, H200, H200_RECORDS.coefficients(shape, H200))
        assert H200_RECORDS.step_seconds(shape, work, H200) == pytest.approx(engine.seconds(work), rel=1e-12)


def test_terms_by_hand() -> None:
    # 64 streams at 800: 15.01 GB of weights, 64 x 800 x 131,072 bytes of KV, 32 layers of 10 us, 64 logits.
    recorded = replace(ALL, weights=1.25, kv=2.0, layer_s=10e-6, sampled=3.0)
    by_hand = LLAMA_8B.weight_bytes_per_step * 1.25 / 4.8e12 + 64 * 800 * 131_072 * 2.0 / 4.8e12 + 32 * 10e-6
    by_hand += 3.0 * 64 * LLAMA_8B.head_matmul_parameters / (989.5e12 / 2)
    assert recorded.step_seconds(LLAMA_8B, decode_work(64, 800), H200) == pytest.approx(by_hand)
    # 80 of 100 GB have copies of 60 GB; 129 streams read the matrices themselves.
    copies = DecodeWeights(WeightCopies(60 * 10**9, 80 * 10**9, 128), None)
    packed = replace(LLAMA_8B, weight_bytes_per_step=100 * 10**9, head_matmul_parameters=0, decode_weights=copies)
    slow = replace(ALL, weights=1.25, weights_alone=1.1)
    for streams, factor, read in ((1, 1.1, 80e9), (128, 1.25, 80e9), (129, 1.25, 100e9)):
        by_hand = read * factor / 4.8e12 + streams * 131_072 / 4.8e12
        assert slow.step_seconds(packed, decode_work(streams, 1), H200) == pytest.approx(by_hand)
    # A prompt of 4,096: products, which reading the weights hides behind, attention, the head once.
    recorded, peak = replace(ALL, matmul=1.6, attention=2.0), 989.5e12 / 2
    by_hand = 1.6 * 4096 * LLAMA_8B.layer_matmul_parameters / peak
    by_hand += (2.0 * LLAMA_8B.attention_multiply_adds(0, 4096) + LLAMA_8B.head_matmul_parameters) / peak
    assert recorded.step_seconds(LLAMA_8B, prefill_work(4096), H200) == pytest.approx(by_hand)
    # A prompt that is alone takes something beside its steps: in its TTFT, and in none of them.
    lone = Phases(LLAMA_8B, H200, replace(recorded, newcomer_s=1e-3))
    assert lone.prefill_s(0, 4096) == pytest.approx(by_hand)
    assert lone.ttft_alone_s(0, 4096) == pytest.approx(by_hand + 1e-3)


def test_experts_have_their_own_factor_by_their_share_of_the_arithmetic() -> None:
    shape = shape_of("30B")
    assert shape.experts is not None
    share = shape.experts.active_parameters / shape.layer_matmul_parameters
    assert 0.5 < share < 1.0
    recorded = replace(ALL, matmul=1.5, expert_matmul=3.0, layer_s=10e-6, expert_layer_s=5e-6)
    found = recorded.coefficients(shape, H200)
    assert found.matmul == pytest.approx(1.5 + 1.5 * share)
    assert found.step_s == pytest.approx(48 * 15e-6)
    assert recorded.coefficients(LLAMA_8B, H200).step_s == pytest.approx(32 * 10e-6)


def test_nothing_is_faster_than_the_floor() -> None:
    works = (decode_work(1, 10), decode_work(300, 5000), prefill_work(3), prefill_work(5000, 3000))
    works += (prefill_work(2, 10**6),)  # which reads 131 GB of KV for two queries
    for shape, work in product((LLAMA_8B, shape_of("8B", is_packed=True), shape_of("30B", is_packed=True)), works):
        floor_s = Floor().step_seconds(shape, work, H200)
        assert floor_s == step_floor_s(shape, work, H200)
        assert H200_RECORDS.step_seconds(shape, work, H200) > floor_s
        # With all of every limit the terms still add up where the floor takes the larger: never below it.
        assert ALL.step_seconds(shape, work, H200) >= floor_s * (1 - 1e-9)
    assert H200_RECORDS.step_seconds(LLAMA_8B, StepWork(), H200) == 0.0


def test_shares_of_each_phase() -> None:
    shares = FloorShares("", "", prefill=0.5, decode=0.25)
    mixed = StepWork(chunks=((0, 300),), num_sampling_chunks=1, contexts=(50, 60))
    prefill_s = step_floor_s(LLAMA_8B, StepWork(chunks=((0, 300),), num_sampling_chunks=1), H200)
    decode_s = step_floor_s(LLAMA_8B, StepWork(contexts=(50, 60)), H200)
    assert shares.step_seconds(LLAMA_8B, mixed, H200) == pytest.approx(2 * prefill_s + 4 * decode_s)


def test_a_fitted_cost_model_is_taken_at_its_word() -> None:
    fitted = Fitted("this machine", "3%", lambda work: 0.1 * len(work.contexts) + 0.001 * work.num_tokens)
    assert fitted.step_seconds(LLAMA_8B, decode_work(4, 100), H200) == pytest.approx(0.404)


def test_what_a_prompt_takes_beside_its_steps_is_part_of_its_ttft_where_it_is_alone() -> None:
    fitted = Fitted("this machine", "3%", lambda work: 0.001 * work.num_tokens, lambda tokens: 0.5 + 0.0001 * tokens)
    phases = Phases(LLAMA_8B, H200, fitted)
    assert phases.prefill_s(100, 200) == pytest.approx(0.2)
    assert phases.ttft_alone_s(100, 200) == pytest.approx(0.2 + 0.53)  # all of the prompt is looked up
    assert phases.loaded(300, 10, 100, 1).ttft_s == pytest.approx(0.73)
    assert phases.loaded(300, 10, 100, 2).prefill_s == pytest.approx(0.2)  # in company it hides behind others' steps
    assert CPU_RECORDS.newcomer_seconds(300) == 0.0  # nobody measured it there


def test_the_figures_that_factors_of_few_bits_were_chosen_by_come_out_again() -> None:
    """No prediction: it holds that the factors are those of the record, and that nothing else has moved them."""
    found = form_points()
    assert {case for case, *_ in found} == {"8b-fp8", "8b-int4", "8b-q4_k_m", "30b-fp8", "gpt-oss-20b"}
    for case, figure, measured, predicted in found:
        assert predicted == pytest.approx(measured, rel=0.05), (case, figure)


def test_unpacking_of_a_short_prompt_predicts_a_long_one() -> None:
    """What a prompt of 512 tokens took more than without unpacking, twice in one of 16,384, which is read in two steps:
    the long one's figure is used for nothing here but to compare."""
    phases = phases_in("Llama-3.1-8B", "q4_k")
    recorded = phases.efficiency
    assert isinstance(recorded, Recorded)
    plain = replace(phases, efficiency=replace(recorded, form=replace(recorded.form, unpacking_bytes=0.0)))
    measured = {figure: took_ms / 1e3 for case, figure, took_ms, _ in form_points() if case == "8b-q4_k_m"}
    unpacking_s = measured["single ttft_ms"] - plain.ttft_alone_s(0, 512)
    assert 2 * CHUNK_TOKENS == 16_384 and unpacking_s > 5e-3
    assert plain.ttft_alone_s(0, 16_384) + 2 * unpacking_s == pytest.approx(measured["prefill ttft_ms"], rel=0.05)


def test_forms_that_nobody_measured_are_taken_by_those_alike_and_said_so() -> None:
    assert "q5_k was not measured: it is taken to be like q4_k" in expected("H200", weights="q5_k").error
    assert "int4 of experts was not measured" in expected("H200", weights="int4", has_experts=True).error
    assert "int4 was measured with one model" in expected("H200", weights="int4").error
    assert expected("H200", weights="f16") == H200_RECORDS
    slow, fast = (expected("H200", weights=form).coefficients(LLAMA_8B, H200) for form in ("q4_k", "bf16"))
    assert slow.weights_alone > fast.weights_alone and slow.prefill_s > fast.prefill_s == 0.0


def test_distance_from_the_records_is_said() -> None:
    assert expected("H200", num_parameters=30_500_000_000) == H200_RECORDS
    assert "71B parameters are larger than any measured" in expected("H200", num_parameters=70_600_000_000).error
    far = expected("MI300X", cuts=["tensor"], arithmetic="fp8")
    assert far.error.startswith("unknown: no MI300X was measured")
    assert "fp8 arithmetic was not measured" in far.error and "tensor parallelism" in far.error
    assert far.coefficients(LLAMA_8B, H200) == H200_RECORDS.coefficients(LLAMA_8B, H200)
