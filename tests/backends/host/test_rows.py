import numpy as np
import pytest

from twostroke.backends.host.rows import NO_BLOCK, RowSet
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.step import BlockGrant, RowJoin, Step

LAYOUT = KVLayout(block_size=4, groups=(KVGroup((0, 2), None, 50), KVGroup((1,), 8, 20)))


@pytest.fixture
def rows():
    return RowSet(LAYOUT, max_context=18, vocab_size=10)  # 5 blocks a row


def join(seq_id, output=()):
    return RowJoin(seq_id, Request(f"r{seq_id}", (1, 2, 3)), output_token_ids=output)


def test_a_row_opens_with_empty_tables_its_length_and_its_last_known_token(rows):
    rows.update(Step(0, joins=(join(7), join(8, output=(5, 6)))))
    assert len(rows) == 2
    assert [table.tolist() for table in rows[7].tables] == [[NO_BLOCK] * 5] * 2
    assert (rows[7].last_token, rows[8].last_token) == (3, 6)
    assert (rows[7].length, rows[8].length) == (3, 5)


def test_grants_extend_one_group_of_one_row(rows):
    rows.update(Step(0, joins=(join(7), join(8)), grants=(BlockGrant(7, 0, 0, (40, 41)), BlockGrant(7, 1, 1, (3,)))))
    rows.update(Step(1, grants=(BlockGrant(7, 0, 2, (49,)),)))
    assert rows[7].tables[0].tolist() == [40, 41, 49, NO_BLOCK, NO_BLOCK]
    assert rows[7].tables[1].tolist() == [NO_BLOCK, 3, NO_BLOCK, NO_BLOCK, NO_BLOCK]
    assert all((table == NO_BLOCK).all() for table in rows[8].tables)
    assert rows[7].tables[0].dtype == np.int32


def test_leaves_come_before_joins_so_a_preempted_row_reopens_clean(rows):
    rows.update(Step(0, joins=(join(7),), grants=(BlockGrant(7, 0, 0, (40, 41)),)))
    old = rows[7]
    rows.update(Step(1, leaves=(7,), joins=(join(7, output=(9,)),), grants=(BlockGrant(7, 0, 0, (12,)),)))
    assert rows[7] is not old
    assert rows[7].tables[0].tolist() == [12, NO_BLOCK, NO_BLOCK, NO_BLOCK, NO_BLOCK]
    rows.update(Step(2, leaves=(7,)))
    assert len(rows) == 0
    with pytest.raises(KeyError):
        rows[7]


@pytest.mark.parametrize("first_index", [4, 5, 6])
def test_a_grant_beyond_the_table_is_an_error_not_a_silent_loss(rows, first_index):
    rows.update(Step(0, joins=(join(7),)))
    with pytest.raises(IndexError):
        rows.update(Step(1, grants=(BlockGrant(7, 0, first_index, (1, 2)[: 2 if first_index == 4 else 1]),)))
