"""Intensities by hand, and the claims that are told about the two phases, checked."""

import pytest

from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.floor import step_multiply_adds
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.cost.roofline import (
    attainable_flops,
    crossover_batch,
    decode_work,
    matmul_intensity,
    matmul_points,
    phase_point,
    prefill_work,
    ridge,
    side,
)

H200 = find_device("h200").ceilings("bf16")
LLAMA_70B = dimensions_from_config(KNOWN_SHAPES["Llama-3.1-70B"].config)
SHAPE_70B = LLAMA_70B.shape(weight_bits=16, kv_bits=16)


@pytest.mark.parametrize(
    ("rows", "intensity"),
    [
        # [M, 8192] x [8192, 8192] in bf16: 2 x M x 8192^2 FLOPs over 2 x (2 x M x 8192 + 8192^2) bytes, which is
        # M x 8192 / (2 M + 8192).
        (1, 8192 / 8194),  # 0.9998: one FLOP a byte
        (1000, 8_192_000 / 10_192),  # 803.8
        (2048, 16_777_216 / 12_288),  # 1365.3
    ],
)
def test_a_matmuls_intensity_by_hand(rows, intensity):
    assert matmul_intensity(rows, 8192, 8192) == pytest.approx(intensity)


def test_quantised_weights_raise_the_intensity_of_one_row():
    # 4 bits: a quarter of the bytes, nearly four times the intensity, and still far below the ridge.
    assert matmul_intensity(1, 8192, 8192, weight_bytes=0.5) == pytest.approx(3.998, abs=0.002)


def test_the_ridge_decides_the_side():
    assert ridge(H200) == pytest.approx(989.5e12 / 4.8e12)
    assert side(matmul_intensity(1, 8192, 8192), H200) == "memory"
    assert side(matmul_intensity(1000, 8192, 8192), H200) == "arithmetic"
    # Below the ridge the rate is bandwidth x intensity, above it the peak.
    assert attainable_flops(1.0, H200) == 4.8e12
    assert attainable_flops(1e6, H200) == 989.5e12


def test_a_token_of_70b_is_140_gflop_not_10():
    # Every layer parameter and the head's, twice: 2 x (68.45 + 1.05) billion = 139 GFLOP; a context of 2,000 adds
    # 4 x 64 heads x 128 x 80 layers x 2,000 = 5.2 GFLOP.
    assert SHAPE_70B.layer_matmul_parameters == 80 * 855_638_016
    flops = 2 * step_multiply_adds(SHAPE_70B, decode_work(1, 2000))
    assert flops == 2 * (80 * 855_638_016 + 128_256 * 8192) + 4 * 64 * 128 * 80 * 2000
    assert flops / 1e9 == pytest.approx(144.2, abs=0.1)


def test_prefill_has_a_quadratic_term():
    def flops(num_tokens):
        return 2 * step_multiply_adds(SHAPE_70B, prefill_work(num_tokens))

    # 32,768 tokens: 2,243 T multiply-adds with the weights, 2 x 64 x 128 x 80 x 32,768^2 / 2 = 704 T with each other.
    # Twice the prompt: (2 x 2,243 + 4 x 704) / (2,243 + 704).
    assert flops(65_536) / flops(32_768) == pytest.approx((2 * 2243 + 4 * 704) / (2243 + 704), abs=1e-3)
    assert flops(2048) / flops(1024) == pytest.approx(2.01, abs=0.01)


def test_phases_lie_on_different_sides():
    prefill = phase_point(SHAPE_70B, prefill_work(2000), H200)
    decode = phase_point(SHAPE_70B, decode_work(1, 2000), H200)
    assert prefill.side == "arithmetic" and prefill.intensity == pytest.approx(2007, abs=2)
    assert decode.side == "memory" and decode.intensity == pytest.approx(1.03, abs=0.01)


def test_intensity_grows_with_the_batch_until_kv_binds():
    short = [phase_point(SHAPE_70B, decode_work(batch, 128), H200).intensity for batch in (1, 8, 64)]
    assert short[1] > 7 * short[0] and short[2] > 7 * short[1]
    crossing = crossover_batch(SHAPE_70B, 128, H200)
    assert crossing is not None
    assert phase_point(SHAPE_70B, decode_work(crossing, 128), H200).side == "arithmetic"
    assert phase_point(SHAPE_70B, decode_work(crossing - 1, 128), H200).side == "memory"
    # At 2,000 tokens a stream brings 655 MB of KV and 144 GFLOP, 220 FLOP/byte: just above the ridge of 206.
    assert crossover_batch(SHAPE_70B, 2000, H200) > 10 * crossing
    # At 8,000 it brings 61 FLOP/byte: no batch is ever bound by arithmetic.
    assert crossover_batch(SHAPE_70B, 8000, H200) is None


def test_every_matrix_of_a_model_in_both_phases():
    points = {point.matrix.name: point for point in matmul_points(LLAMA_70B, 2000, 1, H200)}
    assert set(points) == {"q", "k", "v", "o", "gate", "up", "down", "head"}
    assert points["q"].intensity == pytest.approx(2000 * 8192 / (2 * 2000 + 8192))
    assert points["head"].rows == 1 and points["head"].side == "memory"  # logits are wanted of the last token alone
    decode = matmul_points(LLAMA_70B, 64, 64, H200)
    assert all(point.side == "memory" for point in decode)
    assert decode[0].attainable_flops == pytest.approx(decode[0].intensity * 4.8e12)


def test_experts_meet_few_rows():
    moe = dimensions_from_config(KNOWN_SHAPES["Qwen3-30B-A3B"].config)
    by_name = {point.matrix.name: point for point in matmul_points(moe, 256, 256, H200)}
    # 256 tokens x 8 of 128 experts: 16 rows each, where the dense matrices have 256.
    assert by_name["expert gate"].rows == pytest.approx(16, rel=1e-6)
    assert by_name["q"].rows == 256
    alone = {point.matrix.name: point for point in matmul_points(moe, 1, 1, H200)}
    assert alone["expert gate"].rows == pytest.approx(1)
