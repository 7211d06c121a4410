"""Steps with prompts find their graph captured at start."""

import itertools

import pytest

from twostroke.backends.cuda.captured_sizes import LARGE_AT_START, MAX_CHUNKS, CapturedSizes

MULTIPLY_ADDS = {"qwen3-0.6b": 440_000_000, "llama-8b": 7_500_000_000, "qwen3-30b-a3b": 3_000_000_000}
STEPS = list(itertools.product(range(1, 9000, 37), (0, 1, 31, 32, 33, 128, 244, 256), (1, 2, MAX_CHUNKS)))


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("max_tokens", "max_rows"), [(8192, 256), (2048, 40), (100, 4)])
def test_no_step_of_a_large_model_is_captured_while_streams_wait(model: str, max_tokens: int, max_rows: int):
    """2,560 tokens of the 30B beside streams once took 140 ms, 46 of them to compute."""
    sizes = CapturedSizes.of(max_tokens, max_rows, MULTIPLY_ADDS[model])
    at_start = set(sizes.at_start())
    found = 0
    for num_tokens, num_decodes, num_chunks in STEPS:
        if num_tokens <= max_tokens and num_decodes + num_chunks <= num_tokens and num_decodes <= max_rows:
            shape = sizes.least(num_tokens, num_decodes, num_chunks)
            assert shape is None or shape in at_start
            found += shape is not None
    assert found and len(at_start) < 120


def test_a_shape_holds_its_step():
    sizes = CapturedSizes.of(16384, 256, MULTIPLY_ADDS["qwen3-0.6b"])
    assert len(sizes.large) > LARGE_AT_START
    for num_tokens, num_decodes, num_chunks in STEPS:
        shape = sizes.least(num_tokens, num_decodes, num_chunks)
        assert shape is not None
        assert shape.num_tokens >= num_tokens and shape.decode_slots >= num_decodes
        assert shape.num_tokens > shape.decode_slots and shape.sampled_chunks >= num_chunks


def test_what_fits_no_graph_is_run_without():
    sizes = CapturedSizes.of(8192, 256, MULTIPLY_ADDS["qwen3-30b-a3b"])
    assert sizes.large == (2560,)
    assert sizes.least(2561, 244, 3) is None
    assert sizes.least(512, 10, MAX_CHUNKS + 1) is None
