"""Loads whose side is known, and the claim that KV occupancy tells nothing of a prefill-bound one."""

import pytest

from twostroke.cost.classify import RequestLengths, classify
from twostroke.cost.config_shape import shape_from_config
from twostroke.cost.devices import find_device
from twostroke.cost.floor import StepWork, prefill_floor_s, step_floor_s
from twostroke.cost.known_shapes import KNOWN_SHAPES

H200 = find_device("h200").ceilings("bf16")
LLAMA_8B = shape_from_config(KNOWN_SHAPES["Llama-3.1-8B"].config, weight_bits=16, kv_bits=16)


def test_long_prompts_and_short_answers_are_prefill_bound():
    found = classify(LLAMA_8B, H200, [RequestLengths(8000, 20)], batch=16)
    assert found.bound == "prefill" and found.prefill_share > 0.9
    assert found.prefill_s == prefill_floor_s(LLAMA_8B, 0, 8000, H200)
    assert found.decode_s == pytest.approx(19 * step_floor_s(LLAMA_8B, StepWork(contexts=(8010,) * 16), H200) / 16)
    assert any("prefix cache" in one for one in found.advice)


def test_short_prompts_and_long_answers_are_decode_bound():
    found = classify(LLAMA_8B, H200, [RequestLengths(100, 2000)], batch=16)
    assert found.bound == "decode" and found.prefill_share < 0.05
    assert any("fewer bits a weight" in one for one in found.advice)
    assert not any("prefix cache" in one for one in found.advice)


def test_a_cache_turns_the_same_load_around():
    cold = classify(LLAMA_8B, H200, [RequestLengths(8000, 200)], batch=16)
    cached = classify(LLAMA_8B, H200, [RequestLengths(8000, 200, cached_tokens=7900)], batch=16)
    assert (cold.bound, cached.bound) == ("prefill", "decode")


def test_a_distribution_is_the_sum_of_its_requests():
    short, long = RequestLengths(100, 300), RequestLengths(16_000, 50)
    both = classify(LLAMA_8B, H200, [short, long], batch=8)
    apart = [classify(LLAMA_8B, H200, [one], batch=8) for one in (short, long)]
    assert both.prefill_s == pytest.approx(sum(one.prefill_s for one in apart))
    assert both.decode_s == pytest.approx(sum(one.decode_s for one in apart))


def test_a_prefill_bound_load_saturates_with_kv_half_empty():
    """32 streams of 8,000 tokens hold 34 GB of an H200's 124 GB for KV while prompts take nearly all its seconds."""
    lengths = RequestLengths(8000, 20)
    found = classify(LLAMA_8B, H200, [lengths], batch=32, kv_space_bytes=124e9)
    assert LLAMA_8B.kv_bytes_read(8010) * 32 / 124e9 == pytest.approx(0.27, abs=0.01)
    assert found.prefill_share > 0.9 and found.kv_is_half_empty
    assert any("not by KV occupancy" in one for one in found.advice)
    full = classify(LLAMA_8B, H200, [lengths], batch=32, kv_space_bytes=40e9)
    assert full.kv_is_half_empty is False


def test_measured_seconds_may_take_the_place_of_floors():
    slow_decode = classify(
        LLAMA_8B, H200, [RequestLengths(1000, 100)], batch=1, step_seconds=lambda work: 1.0 if work.contexts else 0.5
    )
    assert (slow_decode.prefill_s, slow_decode.decode_s) == (0.5, 99.0)


@pytest.mark.parametrize("wrong", [(0, 1, 0), (1, 0, 0), (10, 1, 10), (10, 1, -1)])
def test_impossible_lengths(wrong):
    with pytest.raises(ValueError, match="token"):
        RequestLengths(*wrong)
