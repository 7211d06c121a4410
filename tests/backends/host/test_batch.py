from twostroke.backends.host.batch import Batch
from twostroke.backends.host.rows import NO_BLOCK, RowSet
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, DecodeSlot, PrefillChunk, RowJoin, Step

LAYOUT = KVLayout(block_size=4, groups=(KVGroup((0, 2), None, 50), KVGroup((1,), 8, 20)))


def rows_with(*seq_ids):
    rows = RowSet(LAYOUT, max_context=12, vocab_size=100)
    joins = tuple(RowJoin(seq_id, Request(f"r{seq_id}", (seq_id,))) for seq_id in seq_ids)
    grants = tuple(BlockGrant(seq_id, group, 0, (seq_id + group,)) for seq_id in seq_ids for group in (0, 1))
    rows.update(Step(0, joins=joins, grants=grants))
    return rows


def test_decodes_come_first_and_chunks_follow_in_order():
    rows = rows_with(10, 11, 12, 13, 14)
    rows[10].length, rows[11].length, rows[11].last_token = 6, 10, 77
    step = Step(
        1,
        prefills=(
            PrefillChunk(12, start=4, token_ids=(20, 21, 22), samples=False),
            PrefillChunk(13, start=0, token_ids=(30, 31), samples=True),
            PrefillChunk(14, start=2, token_ids=(40, 41), samples=False, prompt_logprobs=0, next_token_id=42),
        ),
        decodes=(DecodeSlot(10, position=5), DecodeSlot(11, position=9)),
    )
    batch = Batch.from_step(step, rows)
    assert batch.token_ids.tolist() == [10, 77, 20, 21, 22, 30, 31, 40, 41]
    assert batch.positions.tolist() == [5, 9, 4, 5, 6, 0, 1, 2, 3]
    assert batch.num_decodes == 2
    assert (batch.num_tokens, batch.num_segments) == (9, 5)
    assert batch.segment_first.tolist() == [0, 1, 2, 5, 7]
    assert batch.segment_count.tolist() == [1, 1, 3, 2, 2]
    assert batch.segment_start.tolist() == [5, 9, 4, 0, 2]
    # Decodes and a sampling chunk want their last position's logits, prompt logprobs every position's.
    assert batch.logit_rows.tolist() == [0, 1, 6, 7, 8]
    assert [table[:, 0].tolist() for table in batch.tables] == [[10, 11, 12, 13, 14], [11, 12, 13, 14, 15]]
    assert all((table[:, 1:] == NO_BLOCK).all() and table.shape == (5, 3) for table in batch.tables)


def test_a_batch_is_a_copy_that_later_grants_do_not_change():
    rows = rows_with(10)
    batch = Batch.from_step(Step(1, decodes=(DecodeSlot(10, 1),)), rows)
    rows.update(Step(2, grants=(BlockGrant(10, 0, 0, (33,)),)))
    assert batch.tables[0].tolist() == [[10, NO_BLOCK, NO_BLOCK]]


def test_a_chunk_that_neither_samples_nor_wants_logprobs_asks_for_no_logits():
    chunk = PrefillChunk(10, start=0, token_ids=(1, 2), samples=False)
    assert Batch.from_step(Step(1, prefills=(chunk,)), rows_with(10)).logit_rows.tolist() == []


def test_a_row_knows_its_own_length_and_a_slots_position_only_bounds_it():
    rows = rows_with(10, 11)
    rows[10].length = 6
    ahead = (DecodeSlot(10, position=8), DecodeSlot(11, position=3))  # of drafts in flight, not all held
    assert Batch.from_step(Step(1, decodes=ahead), rows).positions.tolist() == [5, 0]
    beside = PrefillChunk(11, start=0, token_ids=(11,), samples=True)
    batch = Batch.from_step(Step(1, prefills=(beside,), decodes=ahead[:1]), rows)
    assert batch.positions.tolist() == batch.segment_start.tolist() == [5, 0]
