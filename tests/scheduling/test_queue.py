from __future__ import annotations

import pytest

from tests.scheduling.loop import request
from twostroke.core.sequence import Sequence
from twostroke.scheduling.queue import Rank, RankedQueue, rank_from


def sequence(seq_id: int, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
    return Sequence(seq_id, request(f"r{seq_id}", [1], priority=priority, arrival_s=arrival_s), 0, 10)


def rank_of(member: Sequence, aging_s: float) -> Rank:
    return rank_from(member, member.request.arrival_s, aging_s)


def test_lower_priority_numbers_go_first_then_the_order_of_arrival() -> None:
    queue = RankedQueue[Sequence]()
    for member in (sequence(3), sequence(1), sequence(2, priority=-1), sequence(0, priority=1)):
        queue.add(member, rank_of(member, 30.0))
    assert [member.seq_id for member in queue] == [2, 1, 3, 0]
    assert [member.seq_id for member in reversed(queue)] == [0, 3, 1, 2]


def test_a_level_of_priority_is_worth_so_much_waiting_and_no_more() -> None:
    queue = RankedQueue[Sequence]()
    for member in (
        sequence(0, priority=1, arrival_s=0.0),
        sequence(1, priority=0, arrival_s=29.0),
        sequence(2, priority=0, arrival_s=31.0),
        sequence(3, priority=-(10**9), arrival_s=4_000.0),  # counts as -100
    ):
        queue.add(member, rank_of(member, 30.0))
    assert [member.seq_id for member in queue] == [1, 0, 2, 3]


def test_only_a_member_can_be_removed() -> None:
    queue = RankedQueue[Sequence]()
    first, second = sequence(0), sequence(1)
    queue.add(first, rank_of(first, 30.0))
    with pytest.raises(ValueError, match="is not in this queue"):
        queue.remove(second)
    queue.remove(first)
    assert len(queue) == 0
