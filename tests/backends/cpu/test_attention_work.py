"""The list of work that attention's threads share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.backends.cpu.attention_cases import CASES, make_batch

from twostroke.backends.cpu.arguments import QueryBlockField
from twostroke.backends.cpu.attention_work import AttentionWork, attends_by_rows


@pytest.mark.parametrize(
    ("segments", "num_decodes", "by_rows"),
    [
        ([(1024, 32)], 0, True),
        ([(32, 32)], 0, True),
        ([(31, 32)], 0, False),  # its last queries read twice what the first do
        ([(0, 32)], 0, False),
        ([(1024, 32), (64, 32)], 0, False),
        ([(1024, 1), (1024, 31)], 1, False),
    ],
)
def test_only_pieces_of_equal_cost_are_dealt_in_runs(
    segments: list[tuple[int, int]], num_decodes: int, by_rows: bool
) -> None:
    assert attends_by_rows(make_batch(segments, num_decodes, np.zeros((len(segments), 80), np.int32))) is by_rows


@pytest.mark.parametrize(
    ("tokens", "counts"), [(32, [16, 16]), (31, [16, 15]), (29, [16, 13]), (45, [24, 21]), (33, [18, 15])]
)
def test_tiles_dealt_in_runs_are_nearly_as_large_as_each_other(tokens: int, counts: list[int]) -> None:
    case = CASES["three"]
    batch = make_batch([(1024, tokens)], 0, np.zeros((1, 80), dtype=np.int32))
    blocks = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2).blocks(batch)
    assert list(blocks[:, QueryBlockField.COUNT]) == counts


def test_the_work_list_of_split_decodes() -> None:
    case = CASES["three"]
    batch = make_batch([(530, 1), (255, 1), (256, 1), (0, 5)], 3, np.zeros((4, 40), dtype=np.int32))
    blocks = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=8).blocks(batch)
    by_token = [blocks[blocks[:, QueryBlockField.TOKEN] == token] for token in range(3)]
    assert [list(part[:, QueryBlockField.SPAN]) for part in by_token] == [[0, 1, 2], [0], [0, 1]]
    assert [int(part[0, QueryBlockField.NUM_SPANS]) for part in by_token] == [3, 0, 2]
    results = blocks[blocks[:, QueryBlockField.NUM_SPANS] > 0]
    assert len({int(row[QueryBlockField.FIRST_RESULT] + row[QueryBlockField.SPAN]) for row in results}) == 5
    assert list(blocks[6:, QueryBlockField.COUNT]) == [2, 2, 1], "few queries are spread over threads"
    long = make_batch([(0, 500)], 0, np.zeros((1, 40), dtype=np.int32))
    tiles = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2).blocks(long)
    assert set(tiles[:-1, QueryBlockField.COUNT]) == {32}
    assert tiles[:, QueryBlockField.COUNT].sum() == 500
    busy = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2).blocks(batch)
    assert not busy[:, QueryBlockField.NUM_SPANS].any(), "nine pieces are enough for two threads"


def test_the_work_list_of_the_rows_whose_logits_are_wanted() -> None:
    case = CASES["three"]
    batch = make_batch([(530, 1), (0, 40), (7, 5), (0, 9)], 1, np.zeros((4, 40), dtype=np.int32))
    rows = np.array([0, 40, *range(41, 46)], dtype=np.int32)  # the decode, a chunk's last token, all of a chunk, none
    work = AttentionWork(case.shape, case.kv_heads, accumulators=24, threads=2)
    blocks = work.logit_blocks(replace(batch, logit_rows=rows))
    fields = [QueryBlockField.TOKEN, QueryBlockField.COUNT, QueryBlockField.POSITION, QueryBlockField.SEGMENT]
    assert blocks[:4][:, fields].tolist() == [[0, 1, 530, 0]] * 3 + [[40, 1, 39, 1]]
    assert blocks[:4, QueryBlockField.NUM_SPANS].tolist() == [3, 3, 3, 0]
    assert set(blocks[4:, QueryBlockField.SEGMENT]) == {2}
    assert blocks[4:, QueryBlockField.COUNT].sum() == 5
    assert blocks[4, QueryBlockField.POSITION] == 7
    assert work.logit_blocks(batch).shape == (0, len(QueryBlockField))
