import pytest
import torch

from twostroke.backends.cuda import rows as rows_module
from twostroke.backends.cuda.rows import DeviceRows
from twostroke.backends.cuda.sampling import SamplingFeatures, SamplingRows
from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.step import BlockGrant, RowJoin, Step

LAYOUT = KVLayout(block_size=16, groups=(KVGroup((0, 2), None, 50), KVGroup((1,), 32, 20)))
MAX_ROWS = 3
MAX_CONTEXT = 70  # 5 blocks
NOWHERE = [[50] * 5, [20] * 5]


@pytest.fixture
def rows(device):
    place = torch.device(device)
    return DeviceRows(LAYOUT, MAX_ROWS, MAX_CONTEXT, SamplingRows(MAX_ROWS, 10, place), place)


def join(seq_id, **sampling):
    return RowJoin(seq_id, Request(f"r{seq_id}", (1, 2, 3), SamplingParams(**sampling)))


def table(rows, seq_id):
    return rows.tables[:, rows.index_of[seq_id]].tolist()


def test_a_table_begins_with_scratch_blocks_alone(rows):
    assert rows.tables.shape == (2, MAX_ROWS + 1, 5)
    assert all(rows.tables[:, row].tolist() == NOWHERE for row in range(MAX_ROWS + 1))
    assert len(rows) == 0 and rows.padding_row == MAX_ROWS


def test_grants_extend_one_group_of_one_row(rows):
    rows.update(Step(0, joins=(join(7), join(8)), grants=(BlockGrant(7, 0, 0, (40, 41)), BlockGrant(7, 1, 1, (3,)))))
    rows.update(Step(1, grants=(BlockGrant(7, 0, 2, (49,)), BlockGrant(8, 1, 4, (19,)))))
    assert table(rows, 7) == [[40, 41, 49, 50, 50], [20, 3, 20, 20, 20]]
    assert table(rows, 8) == [[50] * 5, [20, 20, 20, 20, 19]]
    assert rows.tables[:, rows.padding_row].tolist() == NOWHERE


def test_many_entries_go_over_in_several_copies(rows, monkeypatch):
    monkeypatch.setattr(rows_module, "ENTRIES_PER_COPY", 2)
    rows.update(Step(0, joins=(join(7),), grants=(BlockGrant(7, 0, 0, (1, 2, 3, 4, 5)),)))
    assert table(rows, 7) == [[1, 2, 3, 4, 5], [20] * 5]


def test_a_row_that_was_left_serves_the_next(rows):
    rows.update(Step(0, joins=(join(7, top_k=2), join(8), join(9))))
    assert sorted(rows.index_of.values()) == [0, 1, 2]
    row = rows.index_of[7]
    assert rows.sampling.features([row]).filters
    rows.update(Step(1, leaves=(7,), joins=(join(10, temperature=0.0),), grants=(BlockGrant(10, 0, 0, (12,)),)))
    assert rows.index_of[10] == row and 7 not in rows.index_of and len(rows) == 3
    assert rows.sampling.features([row]) == SamplingFeatures()
    assert table(rows, 10)[0][0] == 12


def test_a_preempted_sequence_leaves_and_joins_in_one_step(rows):
    rows.update(Step(0, joins=(join(7),), grants=(BlockGrant(7, 0, 0, (1,)),)))
    rows.update(Step(1, leaves=(7,), joins=(join(7),), grants=(BlockGrant(7, 0, 0, (2,)),)))
    assert len(rows) == 1 and table(rows, 7)[0][0] == 2


def test_leaving_twice_or_unknown_is_no_error(rows):
    rows.update(Step(0, joins=(join(7),)))
    rows.update(Step(1, leaves=(7, 7, 99)))
    rows.update(Step(2, joins=tuple(join(seq_id) for seq_id in (1, 2, 3))))
    assert sorted(rows.index_of.values()) == [0, 1, 2], "a row that was freed twice would be two sequences'"


def test_more_rows_than_there_are_is_an_error(rows):
    step = Step(0, joins=tuple(join(seq_id) for seq_id in range(4)))
    with pytest.raises(IndexError, match="a row for sequence 3 was asked for, and all 3 are taken"):
        rows.update(step)
    rows.take_back(step.joins)
    assert len(rows) == 0
    rows.update(Step(1, joins=step.joins[:3]))
    assert len(rows) == 3


def test_a_grant_beyond_the_table_is_an_error_and_writes_nothing(rows):
    rows.update(Step(0, joins=(join(7), join(8))))
    with pytest.raises(IndexError, match="a grant reaches entry 6 of a block table of 5"):
        rows.update(Step(1, grants=(BlockGrant(7, 0, 0, (1,)), BlockGrant(7, 0, 4, (2, 3)))))
    assert table(rows, 7) == table(rows, 8) == NOWHERE
