"""What a drafter that computes knows of its rows: how far its KV reaches, through guesses, shared blocks and reuse."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.backends.host.draft_rows import DraftRow, DraftRows, Piece, batch_of
from twostroke.backends.host.rows import RowSet
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, PrefillChunk, RowJoin, Step

LAYOUT = KVLayout(4, (KVGroup((0,), None, 8), KVGroup((0,), None, 8, model=1), KVGroup((1,), None, 8, model=1)))


@pytest.fixture
def rows() -> RowSet:
    return RowSet(LAYOUT, max_context=32, vocab_size=100)


@pytest.fixture
def drafted(rows: RowSet) -> DraftRows:
    return DraftRows(rows, LAYOUT, model=1)


def opening(seq_id: int, num_tokens: int, start: int, blocks: tuple[int, ...]) -> Step:
    """A row joins with these blocks in every group, and reads from `start` on."""
    tokens = tuple(range(num_tokens))
    return Step(
        0,
        joins=(RowJoin(seq_id, Request(str(seq_id), tokens)),),
        prefills=(PrefillChunk(seq_id, start, tokens[start:], samples=True),),
        grants=tuple(BlockGrant(seq_id, group, 0, blocks) for group in range(len(LAYOUT.groups))),
    )


def enter(rows: RowSet, drafted: DraftRows, step: Step, opens: bool = True) -> None:
    rows.update(step)
    if opens:
        drafted.open(step.joins[0].seq_id, step.joins[0].request.prompt_token_ids)
    drafted.begin(step)


def test_guesses_stay_while_they_are_right() -> None:
    row = DraftRow([1, 2, 3], (), computed=3, guesses=[4, 5, 6])
    row.extend([4, 5])
    assert (row.computed, row.guesses, row.lag) == (5, [6], 0)
    row.rewind()
    assert (row.computed, row.guesses, row.lag) == (4, [], 1)


def test_a_wrong_guess_ends_what_is_known() -> None:
    row = DraftRow([1, 2, 3], (), computed=3, guesses=[4, 5, 6])
    row.extend([4, 9, 6])
    assert (row.tokens, row.computed, row.guesses, row.lag) == ([1, 2, 3, 4, 9, 6], 4, [], 2)


def test_a_row_that_lags_learns_nothing_from_tokens_that_come() -> None:
    row = DraftRow([1, 2, 3], (), computed=1)
    row.extend([2, 3])
    assert (row.computed, row.lag) == (1, 4)


def test_a_row_begins_where_the_blocks_it_found_are_written(rows: RowSet, drafted: DraftRows) -> None:
    enter(rows, drafted, opening(1, 12, 0, (0, 1, 2)))
    assert drafted[1].computed == 0
    drafted.computed(drafted[1], 9)  # two blocks, and one token of the third
    for seq_id, (start, expected) in enumerate([(4, 4), (8, 8), (12, 8)], start=2):
        enter(rows, drafted, opening(seq_id, 14, start, (*range(start // 4), 4, 5, 6, 7)[:4]))
        assert drafted[seq_id].computed == expected


def test_a_block_written_in_one_group_alone_is_not(rows: RowSet, drafted: DraftRows) -> None:
    enter(rows, drafted, opening(1, 8, 0, (0, 1)))
    drafted.computed(drafted[1], 8)
    rows.update(Step(1, leaves=(1,)))
    drafted.close(1)
    fresh = opening(2, 4, 0, (1,))
    enter(rows, drafted, Step(2, fresh.prefills, joins=fresh.joins, grants=fresh.grants[2:]))
    enter(rows, drafted, opening(3, 9, 8, (0, 1, 5)))
    assert drafted[3].computed == 4


def test_a_block_that_another_row_is_given_holds_nothing(rows: RowSet, drafted: DraftRows) -> None:
    enter(rows, drafted, opening(1, 8, 0, (0, 1)))
    drafted.computed(drafted[1], 8)
    drafted.close(1)
    enter(rows, drafted, opening(2, 8, 0, (1, 0)), opens=False)  # one that nobody drafts for
    assert drafted.get(2) is None
    enter(rows, drafted, opening(3, 9, 8, (1, 0, 4)))
    assert drafted[3].computed == 0


def test_a_batch_of_short_pieces_and_chunks() -> None:
    one, two, three = (DraftRow([], (np.full(4, number, dtype=np.int32),)) for number in range(3))
    batch = batch_of(
        [
            Piece(two, 8, [20, 21, 22], is_chunk=True, wants_logits=True),
            Piece(one, 5, [10, 11], is_chunk=False, wants_logits=True),
            Piece(three, 0, [30], is_chunk=False, wants_logits=False),
        ]
    )
    assert batch.token_ids.tolist() == [10, 11, 30, 20, 21, 22]
    assert batch.positions.tolist() == [5, 6, 0, 8, 9, 10]
    assert batch.num_decodes == 3 and batch.segment_first.tolist() == [0, 1, 2, 3]
    assert batch.segment_count.tolist() == [1, 1, 1, 3] and batch.segment_start.tolist() == [5, 6, 0, 8]
    assert batch.tables[0][:, 0].tolist() == [0, 0, 2, 1]
    assert batch.logit_rows.tolist() == [1, 5]
