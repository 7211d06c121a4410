from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from twostroke.core.kv_layout import KVGroup, KVLayout
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams
from twostroke.core.sequence import Sequence
from twostroke.kv.block_pool import ConservationError
from twostroke.kv.ledger import KVLedger

BLOCK_SIZE = 4


class Ledger(KVLedger):
    """A ledger with the scheduler's few moves, for sequences of any tokens."""

    def __init__(self, *groups: tuple[int | None, int], states: int | None = None, **options: object) -> None:
        """`states`: the slots of one more group, of states."""
        kv_groups = tuple(KVGroup((layer,), *group) for layer, group in enumerate(groups))
        if states is not None:
            kv_groups += (KVGroup((len(groups),), None, states, "state", values=640),)
        super().__init__(KVLayout(BLOCK_SIZE, kv_groups), **options)  # type: ignore[arg-type]
        self.num_sequences = 0

    def sequence(self, tokens: range | list[int], *, salt: str = "", **sampling: object) -> Sequence:
        sampling_params = SamplingParams(**sampling)  # type: ignore[arg-type]
        request = Request(f"r{self.num_sequences}", tuple(tokens), sampling_params, cache_salt=salt)
        self.num_sequences += 1
        return Sequence(self.num_sequences, request, 0, max_total_tokens=1_000)

    def start(self, sequence: Sequence) -> int:
        match = self.match(sequence)
        self.begin(sequence, match)
        sequence.num_computed = match.num_tokens
        return match.num_tokens

    def compute(self, sequence: Sequence, end: int) -> None:
        assert self.reserve(sequence, end) is not None
        sequence.num_computed = end
        self.commit(sequence)

    def run(self, sequence: Sequence) -> int:
        """The whole of it, then gone. Returns the tokens that were found."""
        found = self.start(sequence)
        self.compute(sequence, len(sequence.tokens))
        self.release(sequence)
        return found

    def table(self, sequence: Sequence, group: int = 0) -> list[int | None]:
        holding = self.holding(sequence)
        assert holding is not None
        return holding.tables[group]


def test_full_blocks_are_found_again_up_to_one_token_before_the_end() -> None:
    ledger = Ledger((None, 10))
    assert ledger.run(ledger.sequence(range(11))) == 0
    assert ledger.run(ledger.sequence(range(11))) == 8
    assert ledger.run(ledger.sequence(range(9))) == 8
    assert ledger.run(ledger.sequence(range(8))) == 4, "something must be left to compute"
    assert ledger.run(ledger.sequence([*range(6), 99, 99, 99])) == 4
    assert ledger.run(ledger.sequence([99, *range(1, 11)])) == 0
    ledger.check([])


@pytest.mark.parametrize("digest", [None, lambda before, tokens: bytes(tokens[-1:])], ids=["sound", "collides"])
def test_the_short_way_to_match_finds_what_the_long_one_finds(digest: Callable[[bytes], bytes] | None) -> None:
    """Of few different tokens, in few blocks: prompts share and leave prefixes, and blocks are evicted."""
    ledger, generator = Ledger((None, 12), (None, 9), digest=digest), random.Random(5)
    longest = 0
    for _ in range(300):
        tokens = [generator.choice((1,) * 9 + (2,)) for _ in range(generator.randint(1, 30))]
        sequence = ledger.sequence(tokens)
        match = ledger._matcher._match_in_full(sequence)
        assert match == ledger._matcher._match(ledger.sequence(tokens))
        longest = max(longest, match.num_tokens)
        ledger.run(sequence)
    assert longest >= BLOCK_SIZE
    ledger.check([])


@pytest.mark.parametrize("groups", [((None, 10),), ((None, 10), (5, 10))])
def test_cleared_prefixes_are_found_no_more_but_for_those_that_run(groups: tuple[tuple[int | None, int], ...]) -> None:
    ledger = Ledger(*groups)
    ledger.run(ledger.sequence(range(11)))
    ledger.run(ledger.sequence(range(50, 61)))
    running = ledger.sequence(range(11))
    assert ledger.start(running) == 8
    ledger.compute(running, 9)
    ledger.clear_prefixes()
    ledger.check([running])
    assert ledger.run(ledger.sequence(range(50, 61))) == 0
    assert ledger.run(ledger.sequence(range(11))) == 8, "a running sequence holds it"
    ledger.release(running)
    ledger.clear_prefixes()
    ledger.check([])
    assert len(ledger.index) == 0
    assert all(pool.num_free == pool.num_blocks for pool in ledger.pools)
    assert ledger.run(ledger.sequence(range(11))) == 0


def test_running_sequences_share_full_blocks_and_nothing_else() -> None:
    ledger = Ledger((None, 10))
    one, other = ledger.sequence(range(11)), ledger.sequence(range(11))
    ledger.start(one)
    ledger.compute(one, 11)
    assert ledger.start(other) == 8
    ledger.compute(other, 11)
    assert ledger.table(one)[:2] == ledger.table(other)[:2]
    assert ledger.table(one)[2] != ledger.table(other)[2]
    ledger.check([one, other])
    ledger.release(one)
    ledger.check([other])
    ledger.release(other)
    ledger.check([])


def test_what_is_not_computed_is_not_found() -> None:
    ledger = Ledger((None, 10))
    one = ledger.sequence(range(12))
    ledger.start(one)
    assert ledger.reserve(one, 12) is not None
    assert ledger.match(ledger.sequence(range(12))).num_tokens == 0
    one.num_computed = 7
    ledger.commit(one)
    assert ledger.match(ledger.sequence(range(12))).num_tokens == 4


def test_of_a_block_computed_twice_the_first_is_kept() -> None:
    ledger = Ledger((None, 10))
    one, other = ledger.sequence(range(9)), ledger.sequence(range(9))
    ledger.start(one)
    ledger.start(other)
    ledger.compute(one, 9)
    ledger.compute(other, 9)
    assert ledger.match(ledger.sequence(range(9))).tables[0] == tuple(ledger.table(one)[:2])
    ledger.check([one, other])
    ledger.release(other)
    assert ledger.pools[0].num_cached == 0, "the duplicates were private"
    ledger.release(one)
    assert ledger.pools[0].num_cached == 2


def test_tails_are_evicted_before_heads_and_eviction_forgets() -> None:
    ledger = Ledger((None, 4))
    ledger.run(ledger.sequence(range(13)))  # 3 full blocks and a partial one
    other = ledger.sequence([50 + token for token in range(8)])
    ledger.start(other)
    ledger.compute(other, 8)  # takes the free block, then the stalest cached one
    assert ledger.match(ledger.sequence(range(13))).num_tokens == 8
    ledger.check([other])
    assert ledger.reserve(other, 16) is not None
    assert ledger.match(ledger.sequence(range(13))).num_tokens == 0
    ledger.check([other])


def test_salts_keep_tenants_apart() -> None:
    ledger = Ledger((None, 10))
    ledger.run(ledger.sequence(range(9), salt="a"))
    assert ledger.run(ledger.sequence(range(9), salt="b")) == 0
    assert ledger.run(ledger.sequence(range(9), salt="a")) == 8


@pytest.mark.parametrize("caching", [True, False])
def test_without_the_prefix_cache_only_samples_of_one_request_share(caching: bool) -> None:
    """Switched off for all, or by asking for prompt logprobs."""
    ledger = Ledger((None, 20), prefix_caching=caching)
    first = ledger.sequence(range(9), n=2, prompt_logprobs=0 if caching else None)
    sibling = Sequence(first.seq_id + 1, first.request, 1, max_total_tokens=100)
    ledger.num_sequences += 1
    ledger.run(first)
    assert ledger.match(ledger.sequence(range(9), prompt_logprobs=0 if caching else None)).num_tokens == 0
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 0
    assert ledger.match(sibling).num_tokens == 8


def test_a_hash_collision_shares_nothing() -> None:
    ledger = Ledger((None, 20), digest=lambda before, tokens: b"same")
    ledger.run(ledger.sequence(range(9)))
    assert ledger.run(ledger.sequence([50 + token for token in range(9)])) == 0
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 4, "the second block lost its place to the first"
    ledger.check([])


def test_a_window_gives_back_what_no_query_can_read() -> None:
    ledger = Ledger((None, 10), (6, 10))
    sequence = ledger.sequence(range(30))
    ledger.start(sequence)
    ledger.compute(sequence, 9)  # the next query, at 9, reads from 4 on
    assert ledger.table(sequence, 1)[0] is None and None not in ledger.table(sequence, 1)[1:]
    assert None not in ledger.table(sequence, 0)
    assert ledger.reserve(sequence, 17) is not None
    sequence.num_in_flight = 8  # a query in flight may be at 9 still: nothing may go
    ledger.commit(sequence)
    ledger.check([sequence])
    sequence.num_computed, sequence.num_in_flight = 17, 0
    ledger.commit(sequence)  # the next query, at 17, reads from 12 on
    assert [block is None for block in ledger.table(sequence, 1)] == [True, True, True, False, False]
    ledger.check([sequence])
    ledger.release(sequence)
    ledger.check([])


def test_a_window_matches_by_the_blocks_that_can_still_be_read() -> None:
    ledger = Ledger((6, 10))
    ledger.run(ledger.sequence(range(21)))
    match = ledger.match(ledger.sequence(range(21)))
    assert match.num_tokens == 20
    assert [block is None for block in match.tables[0]] == [True, True, True, False, False]
    sequence = ledger.sequence(range(21))
    ledger.begin(sequence, match)
    sequence.num_computed = 20
    grants = ledger.reserve(sequence, 21)
    assert grants is not None
    assert [(grant.first_index, len(grant.block_ids)) for grant in grants] == [(3, 3)]
    ledger.check([sequence])


def test_the_longest_match_is_one_that_every_group_can_serve() -> None:
    """The window's pool is so small that only a few of its blocks are left, the full group has all of them."""
    ledger = Ledger((None, 30), (6, 4))
    donor = ledger.sequence(range(24))
    ledger.start(donor)
    for end in range(4, 25, 4):
        ledger.compute(donor, end)
    ledger.release(donor)
    assert ledger.match(ledger.sequence(range(25))).num_tokens == 24
    # Evict the newest of the window's blocks: what ends before them must still have its own window, which is gone.
    index, pool = ledger.index, ledger.pools[1]
    entry = index.find(ledger._chains.of(donor)[6])
    assert entry is not None and entry.blocks[1] is not None
    block = entry.blocks[1]
    index.remove(1, block)
    pool.mark_lost(block)
    ledger.check([])
    match = ledger.match(ledger.sequence(range(25)))
    assert match.num_tokens == 20
    assert [block is None for block in match.tables[1]] == [True, True, True, False, False]


def test_a_reservation_takes_all_or_nothing() -> None:
    ledger = Ledger((None, 10), (100, 2))
    sequence = ledger.sequence(range(40))
    ledger.start(sequence)
    assert ledger.room(sequence) == 8
    assert ledger.reserve(sequence, 9) is None
    assert ledger.pools[0].num_available == 10
    grants = ledger.reserve(sequence, 8)
    assert grants is not None and [len(grant.block_ids) for grant in grants] == [2, 2]
    assert ledger.reserve(sequence, 7) == ()
    ledger.check([sequence])


def test_tainted_blocks_are_found_by_nobody() -> None:
    ledger = Ledger((None, 10))
    one, other = ledger.sequence(range(9)), ledger.sequence(range(9))
    ledger.start(one)
    ledger.compute(one, 9)
    ledger.start(other)
    ledger.compute(other, 9)
    ledger.release(one, tainted=True)
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 0
    ledger.check([other])
    ledger.release(other)
    ledger.check([])
    assert ledger.pools[0].num_free == 10


def test_tainted_blocks_behind_a_window_are_found_by_nobody() -> None:
    """They are not the sequence's any more, and it wrote them all the same."""
    ledger = Ledger((5, 10))
    one = ledger.sequence(range(25))
    ledger.start(one)
    ledger.compute(one, 24)
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 8
    ledger.release(one, tainted=True)
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 0
    ledger.check([])
    assert ledger.pools[0].num_free == 10


def test_blocks_from_before_a_preemption_are_found_by_nobody_once_they_are_tainted() -> None:
    ledger = Ledger((None, 10))
    one = ledger.sequence(range(9))
    ledger.start(one)
    ledger.compute(one, 9)
    ledger.release(one)  # preempted: what was in flight then turns out to be wrong
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 8
    ledger.taint(one)
    assert ledger.match(ledger.sequence(range(9))).num_tokens == 0
    ledger.check([])
    assert ledger.pools[0].num_free == 10


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(None, 3)], 13),  # the last token's KV is never written
        ([(None, 3), (5, 2)], 13),  # 5 keys touch 2 blocks at most
        ([(None, 3), (6, 2)], 9),  # 6 keys may touch 3
        ([(6, 3)], None),
        ([(1, 1)], None),
    ],
)
def test_how_long_one_sequence_can_grow(groups: list[tuple[int | None, int]], expected: int | None) -> None:
    assert Ledger(*groups).max_total_tokens == expected


@pytest.mark.parametrize(("window", "num_blocks"), [(1, 1), (5, 2), (6, 3), (9, 3)])
def test_a_window_that_fits_never_runs_out(window: int, num_blocks: int) -> None:
    ledger = Ledger((window, num_blocks))
    sequence = ledger.sequence(range(60))
    ledger.start(sequence)
    while sequence.num_computed < 60:
        end = min(60, ledger.room(sequence))
        assert end > sequence.num_computed
        ledger.compute(sequence, end)
        ledger.check([sequence])


def corrupt_table(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    ledger.table(other)[2] = ledger.table(one)[2]


def corrupt_lost(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    ledger.table(one).pop()


def corrupt_tokens(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    one.tokens[5] = 77


def corrupt_index(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    ledger.index._of_block[0].clear()


def corrupt_shared(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    ledger.pools[0].release(ledger.table(other)[2])  # type: ignore[arg-type]
    ledger.table(other)[2] = ledger.table(one)[2]
    ledger.pools[0].retain(ledger.table(one)[2])  # type: ignore[arg-type]


def corrupt_end(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    ledger._holdings[one.seq_id].end += BLOCK_SIZE


def corrupt_commit(ledger: Ledger, one: Sequence, other: Sequence) -> None:
    one.num_computed = 12  # and nobody told the ledger


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_table, "KV group 0: block . counts 1 references and is in . tables"),
        (corrupt_lost, "counts 1 references and is in 0 tables"),
        (corrupt_tokens, "indexed with other tokens"),
        (corrupt_index, "the index points to block"),
        (corrupt_end, "sequence 1, KV group 0: 3 blocks, and positions below 16 count as held"),
        (corrupt_commit, "has computed 12 positions and committed 2 blocks, and is to commit the next at 12"),
        (corrupt_shared, "shared by sequences 1 and 2 and is not computed by both"),
    ],
)
def test_the_check_names_what_is_wrong(corrupt: Callable[[Ledger, Sequence, Sequence], None], message: str) -> None:
    ledger = Ledger((None, 10))
    one, other = ledger.sequence(range(11)), ledger.sequence(range(11))
    for sequence in (one, other):
        ledger.start(sequence)
        ledger.compute(sequence, 11)
    ledger.check([one, other])
    corrupt(ledger, one, other)
    with pytest.raises(ConservationError, match=message):
        ledger.check([one, other])


def test_the_check_knows_who_runs() -> None:
    ledger = Ledger((None, 10))
    one = ledger.sequence(range(11))
    ledger.start(one)
    with pytest.raises(ConservationError, match=r"sequences \[1\] hold blocks and do not run"):
        ledger.check([])
    with pytest.raises(ConservationError, match=r"sequences \[2\] run and hold none"):
        ledger.check([one, ledger.sequence(range(3))])
