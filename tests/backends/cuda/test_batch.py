import numpy as np

from twostroke.backends.cuda.batch import Batch, CapturedShape
from twostroke.backends.cuda.kernels.embedding import FROM_ROW
from twostroke.core.step import DecodeSlot, PrefillChunk, Step

ROW_OF = {10: 4, 11: 0, 12: 2, 13: 1, 14: 3}
PADDING = 5
STEP = Step(
    1,
    prefills=(
        PrefillChunk(12, start=4, token_ids=(20, 21, 22), samples=False),
        PrefillChunk(13, start=0, token_ids=(30, 31), samples=True),
        PrefillChunk(14, start=7, token_ids=(40,), samples=True),
    ),
    decodes=(DecodeSlot(10, position=5), DecodeSlot(11, position=9)),
)


def test_a_step_as_it_is():
    batch = Batch.from_step(STEP, ROW_OF, PADDING, CapturedShape(8, 2, 2))
    assert batch.token_ids.tolist() == [FROM_ROW, FROM_ROW, 20, 21, 22, 30, 31, 40]
    assert batch.rows.tolist() == [4, 0, 2, 2, 2, 1, 1, 3]
    assert batch.positions.tolist() == [FROM_ROW, FROM_ROW, 4, 5, 6, 0, 1, 7]
    assert (batch.num_tokens, batch.num_decodes, batch.num_sampled) == (8, 2, 4)
    assert batch.segment_first.tolist() == [2, 5, 7]
    assert batch.segment_count.tolist() == [3, 2, 1]
    assert batch.segment_start.tolist() == [4, 0, 7]
    assert batch.segment_rows.tolist() == [2, 1, 3]
    # Decodes, then the chunks that complete a prefill: the order in which results are read.
    assert batch.sampled_tokens.tolist() == [0, 1, 6, 7]
    assert batch.sampled_rows.tolist() == [4, 0, 1, 3]


def test_a_step_in_a_captured_shape_is_padded_with_nobodys_tokens():
    shape = CapturedShape(num_tokens=11, decode_slots=4, sampled_chunks=3)
    batch = Batch.from_step(STEP, ROW_OF, PADDING, shape)
    assert (shape.num_tokens, shape.num_sampled) == (batch.num_tokens, len(batch.sampled_tokens)) == (11, 7)
    assert batch.token_ids.tolist() == [FROM_ROW] * 2 + [20, 21, 22, 30, 31, 40] + [20, 21, 22]
    assert batch.rows.tolist() == [4, 0, 2, 2, 2, 1, 1, 3, PADDING, PADDING, PADDING]
    assert batch.positions.tolist() == [FROM_ROW, FROM_ROW, 4, 5, 6, 0, 1, 7, 0, 0, 0]
    assert batch.num_decodes == 2, "prompts follow the decodes that there are, not those that there is room for"
    assert batch.segment_first.tolist() == [2, 5, 7]
    assert batch.segment_count.tolist() == [3, 2, 1], "padding belongs to no segment"
    assert batch.sampled_tokens.tolist() == [0, 1, 6, 7, 0, 0, 0]
    assert batch.sampled_rows.tolist() == [4, 0, 1, 3, PADDING, PADDING, PADDING]
    assert batch.num_sampled == 4


def test_a_chunk_inside_a_prompt_samples_nothing():
    step = Step(1, prefills=(PrefillChunk(12, start=0, token_ids=(1, 2), samples=False),))
    batch = Batch.from_step(step, ROW_OF, PADDING, CapturedShape(2, 0, 0))
    assert batch.num_sampled == len(batch.sampled_tokens) == len(batch.sampled_rows) == 0
    padded = Batch.from_step(step, ROW_OF, PADDING, CapturedShape(4, 0, 1))
    assert (padded.num_sampled, padded.sampled_rows.tolist()) == (0, [PADDING])


def test_every_array_is_int32_as_kernels_read_them():
    for shape in (CapturedShape(8, 2, 2), CapturedShape(10, 2, 2)):
        batch = Batch.from_step(STEP, ROW_OF, PADDING, shape)
        arrays = [value for value in map(batch.__getattribute__, batch.__slots__) if isinstance(value, np.ndarray)]
        assert len(arrays) == 9 and all(array.dtype == np.int32 for array in arrays)


def test_nobodys_batch_has_a_captured_shapes_sizes_and_harms_no_row():
    batch = Batch.of_nobody(CapturedShape(num_tokens=8, decode_slots=3, sampled_chunks=2), PADDING, 20)
    assert (batch.num_tokens, batch.num_decodes, batch.num_sampled) == (8, 0, 0)
    assert set(batch.rows.tolist()) == set(batch.sampled_rows.tolist()) == {PADDING}
    assert len(batch.sampled_tokens) == 5
    assert batch.positions.tolist() == list(range(8))
    segments = (batch.segment_first, batch.segment_count, batch.segment_start, batch.segment_rows)
    assert [array.tolist() for array in segments] == [[0], [8], [0], [PADDING]]


def test_nobodys_step_of_more_tokens_than_a_context_is_in_chunks():
    batch = Batch.of_nobody(CapturedShape(num_tokens=8, decode_slots=0, sampled_chunks=1), PADDING, 3)
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    segments = (batch.segment_first, batch.segment_count, batch.segment_start, batch.segment_rows)
    assert [array.tolist() for array in segments] == [[0, 3, 6], [3, 3, 2], [0] * 3, [PADDING] * 3]
    assert all(array.dtype == np.int32 for array in (*segments, batch.positions))
