"""Groups of states: one slot a sequence, however long it grows, beside groups of blocks; and slots for snapshots, where
a prefix is found again."""

from __future__ import annotations

import pytest

from tests.kv.test_ledger import Ledger
from twostroke.core.sequence import Sequence
from twostroke.core.timing import PrefixBreak
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
    assert ledger.ahead.shortage(match, 8, 8, (0, 0, 0)) == (0, 0, 1)
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
    assert ledger.pools[2].num_free == 2 and all(pool.num_referenced == 0 for pool in ledger.pools)


def read(
    ledger: Ledger, sequence: Sequence, *ends: int, gone: bool = True, beside: tuple[Sequence, ...] = ()
) -> tuple[int, list[int]]:
    """Read it in chunks with these ends, each a step that went well; returns the tokens that were found, and the
    lengths that snapshots were taken at. `beside`: whoever runs, too."""
    assert ledger.states is not None
    found, taken = ledger.start(sequence), []
    for end in ends:
        assert ledger.reserve(sequence, end) is not None
        taken += [save.length for save in ledger.states.of_chunk(sequence, end)]
        ledger.states.restores()
        sequence.num_computed = end
        ledger.commit(sequence)
        ledger.check([sequence, *beside])
    if gone:
        ledger.release(sequence)
        ledger.check(beside)
    return found, taken


def test_a_prefix_is_found_where_its_state_was_kept() -> None:
    ledger = Ledger((None, 40), states=4, snapshot_tokens=1)
    assert read(ledger, ledger.sequence(range(23)), 6, 12, 20, 23) == (0, [12, 20])
    assert ledger.match(ledger.sequence(range(30))).num_tokens == 20
    assert ledger.match(ledger.sequence(range(20))).num_tokens == 12, "something must be left to compute"
    assert ledger.match(ledger.sequence([*range(19), 99, 99])).num_tokens == 12
    shorter = ledger.match(ledger.sequence([*range(10), *range(50, 60)]))
    assert (shorter.num_tokens, shorter.num_known, shorter.states) == (0, 8, ())
    assert ledger.match(ledger.sequence(range(30), salt="other")).num_tokens == 0


def test_every_group_must_have_its_part() -> None:
    """A window needs its last blocks, a full group all, and the states a snapshot at the same place."""
    ledger = Ledger((None, 40), (6, 40), states=4, snapshot_tokens=1)
    sequence = ledger.sequence(range(23))
    read(ledger, sequence, 12, 20, 23)
    assert ledger.match(ledger.sequence(range(30))).num_tokens == 20
    node = ledger._chains.of(follower := ledger.sequence(range(30)))
    ledger.match(follower)
    entry = ledger.index.find(node[4])
    assert entry is not None and entry.blocks[1] is not None
    block = entry.blocks[1]
    ledger.index.remove(1, block)
    ledger.pools[1].mark_lost(block)
    match = ledger.match(ledger.sequence(range(30)))
    assert match.num_tokens == 12, "behind 20 tokens the window lacks a block"


def test_a_state_is_copied_into_a_slot_of_ones_own() -> None:
    ledger = Ledger((None, 40), states=3, snapshot_tokens=1)
    states = ledger.states
    assert states is not None
    read(ledger, ledger.sequence(range(13)), 12, 13)
    one, other = ledger.sequence(range(20)), ledger.sequence(range(20))
    for sequence in (one, other):
        assert ledger.start(sequence) == 12
        grants = ledger.reserve(sequence, 13)
        assert grants is not None
    kept = {restore.source for restore in states._restores}
    copies = {restore.seq_id: restore.target for restore in states.restores()}
    assert copies == {sequence.seq_id: ledger.table(sequence, 1)[0] for sequence in (one, other)}
    assert len(kept) == 1 and kept.isdisjoint(copies.values())
    ledger.check([one, other])
    assert ledger.match(ledger.sequence(range(20))).num_tokens == 12, "it is still there"
    # A third has no slot: all others are somebody's own, and the snapshot becomes its own.
    third = ledger.sequence(range(20))
    assert ledger.start(third) == 12 and ledger.room(third) > 12
    assert ledger.reserve(third, 13) is not None and states.restores() == ()
    assert set(ledger.table(third, 1)) == kept
    assert ledger.match(ledger.sequence(range(20))).num_tokens == 0
    ledger.check([one, other, third])
    for sequence in (one, other, third):
        ledger.release(sequence)
    ledger.check([])


def test_a_snapshot_takes_no_slot_from_whoever_runs_and_goes_first_if_another_follows_it() -> None:
    ledger = Ledger((None, 60), states=4, snapshot_tokens=1)
    early = ledger.sequence(range(100, 109))
    read(ledger, early, 8, 9)
    long = ledger.sequence(range(40))
    # Of a long prompt each makes the one before it dispensable: three slots are left beside its own, and two suffice.
    assert read(ledger, long, 4, 8, 12, 16, 20, 36, gone=False) == (0, [4, 8, 12, 16, 20, 36])
    assert ledger.match(ledger.sequence(range(100, 120))).num_tokens == 8, "of another prompt"
    assert ledger.match(ledger.sequence(range(50))).num_tokens == 36
    assert ledger.match(ledger.sequence(range(18))).num_tokens in (0, 4, 8, 12), "the stalest of its own went"
    others = [ledger.sequence(range(200 + 20 * number, 209 + 20 * number)) for number in range(3)]
    for number, sequence in enumerate(others):
        read(
            ledger, sequence, 8, gone=False, beside=(long, *others[:number])
        )  # with the last of them every slot is somebody's own
    assert ledger.match(ledger.sequence(range(50))).num_tokens == 0
    assert ledger.pools[1].num_available == 0
    ledger.check([long, *others])


def test_what_a_step_that_failed_would_have_kept_is_never_found() -> None:
    ledger = Ledger((None, 40), states=4, snapshot_tokens=1)
    assert ledger.states is not None
    fails, aborted = ledger.sequence(range(20)), ledger.sequence(range(50, 70))
    for sequence in (fails, aborted):
        ledger.start(sequence)
        ledger.compute(sequence, 4)
        ledger.reserve(sequence, 8)
        assert list(ledger.states.of_chunk(sequence, 8))
    ledger.check([fails, aborted])
    ledger.release(aborted)
    ledger.release(fails, tainted=True)
    ledger.check([])
    assert ledger.pools[1].num_free == 4
    # And of one that fails later, what was kept before.
    read(ledger, fails := ledger.sequence(range(20)), 8, 16, gone=False)
    assert ledger.match(ledger.sequence(range(20))).num_tokens == 16
    ledger.release(fails, tainted=True)
    assert ledger.match(ledger.sequence(range(20))).num_tokens == 0
    ledger.check([])


def test_cleared_snapshots_are_found_no_more() -> None:
    ledger = Ledger((None, 40), states=4, snapshot_tokens=1)
    read(ledger, ledger.sequence(range(20)), 16, 20)
    ledger.clear_prefixes()
    ledger.check([])
    assert ledger.pools[1].num_free == 4 and ledger.match(ledger.sequence(range(20))).num_tokens == 0


def test_states_alone_are_found_without_blocks() -> None:
    ledger = Ledger(states=5, snapshot_tokens=1)
    assert read(ledger, ledger.sequence(range(20)), 8, 16, 20) == (0, [8, 16, 20])
    assert read(ledger, ledger.sequence(range(40)), 40) == (20, [40])
    assert len(ledger.index) == 4


def test_a_miss_says_that_the_state_is_missing() -> None:
    ledger = Ledger((None, 40), states=4, snapshot_tokens=1)
    read(ledger, ledger.sequence(range(20)), 8, 20)
    for prompt, expected in (
        ([*range(16), *range(90, 96)], PrefixBreak(8, "state", 8)),
        ([*range(8), *range(90, 96)], PrefixBreak(8, "differs", 0)),
        (range(23), None),
    ):
        sequence = ledger.sequence(prompt)
        match = ledger.match(sequence)
        assert ledger.prefix_break(sequence, match) == expected


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
