"""Groups of states: one slot a sequence, however long it grows, beside groups of blocks."""

from __future__ import annotations

import pytest

from tests.kv.test_ledger import Ledger
from twostroke.kv.block_pool import ConservationError


def test_a_state_takes_one_slot_however_long_its_sequence_grows() -> None:
    ledger = Ledger((None, 20), (6, 20), states=2)
    one, other, third = (ledger.sequence(range(30)) for _ in range(3))
    for sequence in (one, other):
        assert ledger.start(sequence) == 0
        grants = ledger.reserve(sequence, 6)
        assert grants is not None
        assert {grant.group: len(grant.block_ids) for grant in grants} == {0: 2, 1: 2, 2: 1}
        sequence.num_computed = 6
        ledger.commit(sequence)
        ledger.check([one, other] if sequence is other else [one])
    assert ledger.table(one, 2) != ledger.table(other, 2), "a state is nobody else's"
    grants = ledger.reserve(one, 30)
    assert grants is not None and [grant.group for grant in grants] == [0, 1], "the slot is held already"
    # A third would find blocks enough, and no slot.
    match = ledger.match(third)
    assert ledger.shortage(match, 8, 8, (0, 0, 0)) == (0, 0, 1)
    ledger.begin(third, match)
    assert ledger.room(third) == 0 and ledger.reserve(third, 4) is None
    ledger.check([one, other, third])
    ledger.release(other)
    assert ledger.room(third) > 0 and ledger.blocks_to_come(third, 8, 8) == [2, 2, 1]
    ledger.compute(third, 8)
    assert ledger.blocks_to_come(third, 12, 8)[2] == 0
    ledger.check([one, third])
    for sequence in (one, third):
        ledger.release(sequence)
    ledger.check([])
    assert all(pool.num_free == pool.num_blocks for pool in ledger.pools)


def test_beside_states_no_prefix_is_found_again() -> None:
    """Blocks may still be there, but what the state was behind them is not."""
    ledger = Ledger((None, 20), states=2)
    assert ledger.run(ledger.sequence(range(11))) == 0
    assert ledger.run(ledger.sequence(range(11))) == 0
    assert len(ledger.index) == 0 and ledger.pools[0].num_cached == 0
    ledger.check([])


@pytest.mark.parametrize(("groups", "expected"), [([(None, 3)], 13), ([(6, 3)], None), ([], None)])
def test_a_state_bounds_no_sequence(groups: list[tuple[int | None, int]], expected: int | None) -> None:
    ledger = Ledger(*groups, states=1)
    assert ledger.max_total_tokens == expected
    sequence = ledger.sequence(range(12))
    ledger.start(sequence)
    ledger.compute(sequence, 12)
    ledger.check([sequence])


def test_the_check_sees_a_state_that_two_share() -> None:
    ledger = Ledger((None, 20), states=2)
    one, other = ledger.sequence(range(11)), ledger.sequence(range(11))
    for sequence in (one, other):
        ledger.start(sequence)
        ledger.compute(sequence, 11)
    ledger.pools[1].release(ledger.table(other, 1)[0])  # type: ignore[arg-type]
    ledger.table(other, 1)[0] = ledger.table(one, 1)[0]
    ledger.pools[1].retain(ledger.table(one, 1)[0])  # type: ignore[arg-type]
    with pytest.raises(ConservationError, match="shared by sequences 1 and 2, and holds the state of one"):
        ledger.check([one, other])
    ledger.table(one, 1).append(1)
    with pytest.raises(ConservationError, match="KV group 1"):
        ledger.check([one, other])
