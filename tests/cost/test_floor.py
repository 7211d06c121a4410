"""Floors against numbers worked out by hand for SmolLM2-135M: Q4_1 layers, a Q8_0 tied table, F32 norms, f16 KV."""

from array import array
from dataclasses import replace

import pytest
from tests.cost.shapes import SMOLLM2

from twostroke.core.step import DecodeSlot, Drafts, Step
from twostroke.cost.floor import (
    StepWork,
    contexts_multiply_adds,
    decode_floor_s,
    decode_run_floor_s,
    prefill_floor_s,
    prefill_multiply_adds,
    step_bytes_read,
    step_floor_s,
    step_multiply_adds,
    work_of,
)
from twostroke.cost.hardware import Ceilings
from twostroke.cost.model_shape import DecodeWeights, KVGroupShape, LatentWork, ModelShape, WeightCopies

CEILINGS = Ceilings(read_bytes_per_s=40e9, multiply_adds_per_s=400e9, source="a round machine")


def test_prefill_of_512_is_bound_by_arithmetic():
    # 512 x 106,168,320 = 54,358,179,840; the head once, 28,311,552;
    # attention: 2 x 9 x 64 x 30 layers x 512 x 513 / 2 pairs = 4,538,695,680.
    assert prefill_multiply_adds(SMOLLM2, 0, 512) == 58_925_187_072
    assert prefill_floor_s(SMOLLM2, 0, 512, CEILINGS) == pytest.approx(0.14731296768)


def test_a_short_prefill_is_bound_by_reading_the_weights():
    # 8 tokens are about 0.9 G multiply-adds, 2.2 ms; 96.6 MB at 40 GB/s take 2.41 ms.
    assert prefill_floor_s(SMOLLM2, 0, 8, CEILINGS) == pytest.approx(0.0024144192)
    assert prefill_floor_s(SMOLLM2, 0, 1, CEILINGS) == prefill_floor_s(SMOLLM2, 0, 8, CEILINGS)


def test_cached_tokens_cost_attention_only():
    # 100 tokens after 400 cached: pairs 401 + ... + 500 = 45,050.
    expected = 100 * 106_168_320 + 28_311_552 + 2 * 9 * 64 * 30 * 45_050
    assert prefill_multiply_adds(SMOLLM2, 400, 100) == expected
    assert prefill_floor_s(SMOLLM2, 400, 100, CEILINGS) > prefill_floor_s(SMOLLM2, 0, 100, CEILINGS)


def test_nothing_to_read_costs_nothing():
    assert prefill_floor_s(SMOLLM2, 512, 0, CEILINGS) == 0.0


def test_decode_reads_the_weights_and_its_context():
    # 512 positions of 23,040 bytes are 11,796,480; with the weights 108,373,248: 2.709 ms at 40 GB/s, 369 a second.
    assert decode_floor_s(SMOLLM2, 512, CEILINGS) == pytest.approx(0.0027093312)
    assert 1 / decode_floor_s(SMOLLM2, 512, CEILINGS) == pytest.approx(369.1, abs=0.05)


def test_a_step_of_one_stream_is_its_decode_floor():
    work = StepWork(contexts=(512,))
    assert step_floor_s(SMOLLM2, work, CEILINGS) == decode_floor_s(SMOLLM2, 512, CEILINGS)
    # Every weight meets the one token; 512 keys and values, 64 numbers each, in 9 heads of 30 layers.
    assert step_multiply_adds(SMOLLM2, work) == 106_168_320 + 28_311_552 + 2 * 9 * 64 * 30 * 512


def test_a_batch_reads_the_weights_once_and_every_context():
    work = StepWork(contexts=(100, 200, 300))
    assert step_bytes_read(SMOLLM2, work) == 96_576_768 + 600 * 23_040
    alone_s = sum(decode_floor_s(SMOLLM2, context, CEILINGS) for context in (100, 200, 300))
    assert step_floor_s(SMOLLM2, work, CEILINGS) < alone_s / 2


def test_a_slot_with_drafts_reads_its_context_once_and_multiplies_for_every_query():
    # A slot at position 507 with four drafts, and one at 99 without: contexts of 512 and 100.
    step = Step(0, decodes=(DecodeSlot(0, 507, Drafts(4)), DecodeSlot(1, 99)))
    work = work_of(step)
    assert (list(work.contexts), list(work.queries)) == ([512, 100], [5, 1])
    assert work.num_tokens == work.num_queries == step.num_tokens == 6
    assert step_bytes_read(SMOLLM2, work) == 96_576_768 + 612 * 23_040
    pairs = 508 + 509 + 510 + 511 + 512 + 100
    assert step_multiply_adds(SMOLLM2, work) == 6 * (106_168_320 + 28_311_552) + 2 * 9 * 64 * 30 * pairs
    assert work_of(Step(0, decodes=(DecodeSlot(0, 511),))) == StepWork(contexts=array("q", [512]))


def test_a_large_batch_is_bound_by_arithmetic():
    # 256 streams at a context of one: 256 x 134,479,872 weights and 256 x 34,560 of attention at 400 G/s.
    work = StepWork(contexts=(1,) * 256)
    assert step_floor_s(SMOLLM2, work, CEILINGS) == pytest.approx(256 * (134_479_872 + 34_560) / 400e9)


def test_a_step_of_one_whole_prompt_is_its_prefill_floor():
    work = StepWork(chunks=((0, 512),), num_sampling_chunks=1)
    assert step_floor_s(SMOLLM2, work, CEILINGS) == prefill_floor_s(SMOLLM2, 0, 512, CEILINGS)


def test_chunks_add_up_to_the_prompt_where_arithmetic_binds():
    first, last = StepWork(chunks=((0, 256),)), StepWork(chunks=((256, 256),), num_sampling_chunks=1)
    both_s = step_floor_s(SMOLLM2, first, CEILINGS) + step_floor_s(SMOLLM2, last, CEILINGS)
    assert both_s == pytest.approx(prefill_floor_s(SMOLLM2, 0, 512, CEILINGS))


def test_a_chunk_reads_what_lies_before_it_up_to_its_window():
    windowed = ModelShape(0, 0, 0, 1000, 1, 1, (KVGroupShape(1, None, 10), KVGroupShape(1, 8, 100)))
    assert step_bytes_read(windowed, StepWork(chunks=((0, 4),))) == 1000
    # Position 20 reads positions 0 to 19 in the full layer, 13 to 19 in the windowed one.
    assert step_bytes_read(windowed, StepWork(chunks=((20, 4),))) == 1000 + 20 * 10 + 7 * 100


def test_both_phases_share_one_step():
    mixed = StepWork(chunks=((0, 300),), num_sampling_chunks=1, contexts=(50, 60))
    parts = StepWork(chunks=((0, 300),), num_sampling_chunks=1), StepWork(contexts=(50, 60))
    assert step_multiply_adds(SMOLLM2, mixed) == sum(step_multiply_adds(SMOLLM2, part) for part in parts)
    assert step_bytes_read(SMOLLM2, mixed) == sum(step_bytes_read(SMOLLM2, part) for part in parts) - 96_576_768


def test_a_step_without_work_costs_nothing():
    assert step_floor_s(SMOLLM2, StepWork(), CEILINGS) == 0.0


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_ceilings_are_positive_and_finite(wrong):
    with pytest.raises(ValueError, match="read_bytes_per_s"):
        Ceilings(wrong, 1.0, "wrong")
    with pytest.raises(ValueError, match="multiply_adds_per_s"):
        Ceilings(1.0, wrong, "wrong")


def test_a_run_of_tokens_is_the_sum_of_its_tokens():
    shape = ModelShape(1000, 800, 100, 2000, 2, 4, (KVGroupShape(1, None, 8), KVGroupShape(2, 5, 16)))
    ceilings = Ceilings(1e6, 1e6, "by hand")
    for first, count in ((1, 0), (1, 3), (3, 9), (40, 7)):
        each = sum(decode_floor_s(shape, context, ceilings) for context in range(first, first + count))
        assert decode_run_floor_s(shape, first, count, ceilings) == pytest.approx(each)
    whole = decode_run_floor_s(shape, 40, 8, ceilings)
    assert decode_run_floor_s(shape, 40, 8, ceilings, num_steps=2) == pytest.approx(whole / 4)  # two steps read twice


# SmolLM2 in bf16, with copies of its down matrices, 30 x 576 x 1536 weights, in 12 bits and a factor a row.
PLAIN = replace(SMOLLM2, weight_bytes_per_step=2 * 134_515_008)
DOWN = 30 * 576 * 1536
PACKED = replace(PLAIN, decode_weights=DecodeWeights(WeightCopies(DOWN * 3 // 2 + 30 * 576 * 4, DOWN * 2, 128), None))
SPARED = DOWN // 2 - 30 * 576 * 4


def test_decode_floors_count_what_decode_reads():
    assert decode_floor_s(PACKED, 512, CEILINGS) == pytest.approx(decode_floor_s(PLAIN, 512, CEILINGS) - SPARED / 40e9)
    run = decode_run_floor_s(PLAIN, 100, 7, CEILINGS) - 7 * SPARED / 40e9
    assert decode_run_floor_s(PACKED, 100, 7, CEILINGS) == pytest.approx(run)


def test_steps_of_many_tokens_read_the_weights_themselves():
    """Of either phase: a step is known by its tokens alone."""
    spared_s = prefill_floor_s(PLAIN, 0, 8, CEILINGS) - prefill_floor_s(PACKED, 0, 8, CEILINGS)
    assert spared_s == pytest.approx(SPARED / 40e9), "a short prompt is read as fast as memory allows"
    assert prefill_floor_s(PACKED, 0, 129, CEILINGS) == prefill_floor_s(PLAIN, 0, 129, CEILINGS)
    for few in (StepWork(contexts=[100] * 128), StepWork(chunks=((0, 120),), contexts=[100] * 8)):
        assert step_bytes_read(PACKED, few) == step_bytes_read(PLAIN, few) - SPARED
    for many in (StepWork(contexts=[100] * 129), StepWork(chunks=((0, 128),), contexts=[100])):
        assert step_bytes_read(PACKED, many) == step_bytes_read(PLAIN, many)


@pytest.mark.parametrize(
    "group",
    [
        KVGroupShape(30, None, 23_040),
        KVGroupShape(4, 16, 640, num_sharing=2),
        KVGroupShape(3, 1, 900, "state", pair_multiply_adds=77),
        KVGroupShape(6, None, 120, "latent", latent=LatentWork(1000, 300, 40)),
    ],
    ids=["whole", "windowed and shared", "states", "latent"],
)
def test_slots_without_drafts_multiply_as_much_as_each_alone(group: KVGroupShape):
    """The short way for them, beside the one for slots with drafts."""
    shape, contexts = replace(SMOLLM2, kv_groups=(group, *SMOLLM2.kv_groups)), (1, 2, 15, 16, 17, 400)
    plain = StepWork(chunks=((32, 8),), contexts=contexts)
    one_each = replace(plain, queries=(1,) * len(contexts))
    assert step_multiply_adds(shape, plain) == step_multiply_adds(shape, one_each)
    attention = sum(shape.attention_multiply_adds(context - 1, 1) for context in contexts)
    assert contexts_multiply_adds(shape, contexts) == attention > 0
