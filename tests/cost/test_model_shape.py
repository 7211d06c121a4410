from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cost.shapes import ROUND

from twostroke.cost.model_shape import DecodeWeights, ExpertsShape, KVGroupShape, LatentWork, ModelShape, WeightCopies


@given(
    start=st.integers(0, 60),
    num_tokens=st.integers(0, 60),
    window=st.one_of(st.none(), st.integers(1, 70)),
)
def test_query_key_pairs_are_those_of_the_mask(start, num_tokens, window):
    """Counted one by one: a query at q reads keys above q - window, up to q."""
    counted = sum(
        1
        for query in range(start, start + num_tokens)
        for key in range(query + 1)
        if window is None or key > query - window
    )
    assert KVGroupShape(1, window, 1).query_key_pairs(start, num_tokens) == counted


@pytest.mark.parametrize(("window", "context_len", "positions"), [(None, 100, 100), (8, 5, 5), (8, 8, 8), (8, 100, 8)])
def test_positions_read_stop_at_the_window(window, context_len, positions):
    assert KVGroupShape(1, window, 1).positions_read(context_len) == positions


def test_groups_add_up():
    groups = (KVGroupShape(2, None, 100), KVGroupShape(3, 4, 1000))
    shape = replace(ROUND, num_heads=4, head_dim=8, kv_groups=groups)
    assert shape.kv_bytes_per_token == 1100
    assert shape.kv_bytes_read(10) == 10 * 100 + 4 * 1000
    # Queries 0 to 5: 1+2+3+4+5+6 pairs in each full layer, 1+2+3+4+4+4 in each windowed one.
    assert shape.attention_multiply_adds(0, 6) == 2 * 4 * 8 * (2 * 21 + 3 * 18)


def test_a_chunk_of_latent_attention_is_priced_as_it_is_computed():
    """A bound is the cheaper of two ways. A backend has one: it expands all that a chunk reads, or the chunk alone."""
    work = LatentWork(expanded_per_pair=10, absorbed_per_pair=30, expansion_per_position=200)
    expanding = replace(ROUND, kv_groups=(KVGroupShape(1, None, 1, "latent", latent=work),))
    absorbing = expanding.with_contexts_absorbed()
    for start, length in ((0, 7), (40, 2), (40, 60)):
        own, before = length * (length + 1) // 2, start * length
        bound = absorbing.attention_multiply_adds(start, length)
        assert bound == min(10 * (own + before) + 200 * start, 30 * (own + before))
        found = [one.expected_attention_multiply_adds(start, length, is_chunk=True) for one in (expanding, absorbing)]
        again = 200 * length if start else 0  # queries are brought to latents, and back
        assert found == [10 * (own + before) + 200 * start, 10 * own + 30 * before + again]
        assert min(found) >= bound
        for shape in (expanding, absorbing):
            assert shape.expected_attention_multiply_adds(start, length, is_chunk=False) == 30 * (own + before)


def test_experts_that_a_batch_reads():
    """Against a count over random choices: 6 tokens that each choose 2 of 8 without regard to the others."""
    random = Random(0)
    rounds = 20_000
    touched = sum(len({expert for _ in range(6) for expert in random.sample(range(8), 2)}) for _ in range(rounds))
    experts = ExpertsShape(num_experts=8, experts_per_token=2, weight_bytes=800, matmul_parameters=400)
    assert experts.weight_bytes_read(6) / 100 == pytest.approx(touched / rounds, rel=0.01)
    assert experts.weight_bytes_read(1) == pytest.approx(200)
    assert experts.weight_bytes_read(10_000) == pytest.approx(800)


def packed_shape(**changes):
    sizes = {
        "num_parameters": 0,
        "layer_matmul_parameters": 0,
        "head_matmul_parameters": 0,
        "weight_bytes_per_step": 1000,
        "num_heads": 4,
        "head_dim": 8,
        "kv_groups": (KVGroupShape(2, None, 100),),
    }
    return ModelShape(**{**sizes, **changes})


def test_steps_of_few_tokens_read_the_copies_of_dense_matrices():
    """800 of 1000 bytes are packed into 600."""
    shape = packed_shape(decode_weights=DecodeWeights(WeightCopies(600, 800, max_tokens=128), None), embedding_bytes=7)
    assert shape.weight_bytes_read(1) == shape.weight_bytes_read(128) == shape.dense_bytes_read(128) == 800
    assert shape.weight_bytes_read(129) == shape.dense_bytes_read(129) == 1000
    assert shape.weight_bytes == 1000 + 7 + 600, "both are held"
    assert shape.expected_dense_reads(128) == (600, 200) and shape.expected_dense_reads(129) == (0, 1000)
    assert packed_shape().expected_dense_reads(1) == (0, 1000)
    assert packed_shape().weight_bytes_read(1) == 1000


def test_steps_of_few_tokens_read_the_copies_of_their_experts():
    experts = ExpertsShape(num_experts=8, experts_per_token=2, weight_bytes=800, matmul_parameters=400)
    copies = DecodeWeights(WeightCopies(75, 100, max_tokens=4), WeightCopies(600, 800, max_tokens=10_000))
    shape = packed_shape(experts=experts, decode_weights=copies)
    assert packed_shape(experts=experts).expert_bytes_read(1) == pytest.approx(200)
    assert shape.expert_bytes_read(1) == pytest.approx(150)
    assert shape.weight_bytes_read(1) == pytest.approx(1000 - 25 + 150)
    # Of 10,000 tokens some meet each expert; dense matrices are read as they are from 5 on.
    assert shape.weight_bytes_read(10_000) == pytest.approx(1000 + 600)
    assert shape.weight_bytes_read(10_001) == pytest.approx(1000 + 800)
    assert shape.weight_bytes == 1000 + 800 + 675
    assert shape.expected_bytes_read(1) == shape.weight_bytes_read(1), "one token reads nothing of experts but copies"


def test_copies_of_what_is_stored_in_less_spare_nothing():
    """Weights of a quantised file are counted as it has them: no copy makes their floor higher."""
    shape = packed_shape(decode_weights=DecodeWeights(WeightCopies(900, 700, max_tokens=128), None))
    assert shape.weight_bytes_read(1) == 1000 and shape.expected_dense_reads(1) == (900, 300), "a bound is no more"


def test_the_fewest_tokens_may_read_layers_as_they_are_and_the_head_s_copy():
    """Of the 800 bytes 100 are the head's, packed into 75. A bound counts all copies from the first token on."""
    copies = WeightCopies(600, 800, max_tokens=128, plain_tokens=2, head_bytes=75, head_replaced_bytes=100)
    shape = packed_shape(decode_weights=DecodeWeights(copies, None))
    assert shape.expected_dense_reads(2) == (75, 200 + 700) and shape.expected_dense_reads(3) == (600, 200)
    assert shape.dense_bytes_read(1) == shape.dense_bytes_read(3) == 800
    assert (shape.expected_bytes_read(2), shape.expected_bytes_read(3), shape.expected_bytes_read(129)) == (
        975,
        800,
        1000,
    )
