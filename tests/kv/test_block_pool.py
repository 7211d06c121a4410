from __future__ import annotations

import pytest

from twostroke.kv.block_pool import BlockPool, ConservationError


def make_pool(num_blocks: int) -> tuple[BlockPool, list[int]]:
    evicted: list[int] = []
    return BlockPool(num_blocks, evicted.append), evicted


def allocate_findable(pool: BlockPool) -> int:
    block = pool.allocate()
    pool.mark_findable(block)
    return block


def test_uncached_blocks_are_used_before_cached_ones() -> None:
    pool, evicted = make_pool(3)
    cached, plain = allocate_findable(pool), pool.allocate()
    pool.release(cached)
    pool.release(plain)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (2, 1, 3)
    assert cached not in {pool.allocate(), pool.allocate()}
    assert evicted == []
    assert pool.allocate() == cached
    assert evicted == [cached]
    assert not pool.is_findable(cached)


def test_cached_blocks_are_given_up_all_at_once_and_held_ones_stay() -> None:
    pool, evicted = make_pool(4)
    held, first, second = (allocate_findable(pool) for _ in range(3))
    pool.release(first)
    pool.release(second)
    pool.evict_cached()
    assert evicted == [first, second]
    assert (pool.num_free, pool.num_cached, pool.num_referenced) == (3, 0, 1)
    assert pool.is_findable(held) and not pool.is_findable(first)
    pool.check({held: 1})


def test_the_least_recently_released_is_evicted_first() -> None:
    pool, evicted = make_pool(3)
    blocks = [allocate_findable(pool) for _ in range(3)]
    for index in (1, 2, 0):
        pool.release(blocks[index])
    pool.retain(blocks[1])  # used again: now the most recent
    pool.release(blocks[1])
    for _ in range(3):
        pool.allocate()
    assert evicted == [blocks[2], blocks[0], blocks[1]]


def test_a_shared_block_lives_until_its_last_holder_is_gone() -> None:
    pool, _ = make_pool(1)
    block = allocate_findable(pool)
    pool.retain(block)
    assert pool.references(block) == 2
    pool.release(block)
    assert pool.num_available == 0
    pool.check({block: 1})
    pool.release(block)
    assert pool.num_cached == 1
    pool.check({})


def test_a_lost_block_becomes_free() -> None:
    pool, evicted = make_pool(1)
    block = allocate_findable(pool)
    pool.release(block)
    pool.mark_lost(block)
    assert (pool.num_free, pool.num_cached) == (1, 0)
    assert pool.allocate() == block
    assert evicted == []


def test_releasing_too_often_is_an_error() -> None:
    pool, _ = make_pool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(ConservationError, match=f"block {block} was released more often"):
        pool.release(block)


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        make_pool(0)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "twice"),
        (lambda pool: pool._free.pop(), "in 0 places"),
        (lambda pool: pool._references.__setitem__(0, 2), "counts 2 references and is in 1 tables"),
        (lambda pool: pool._free.append(0), "in 2 places"),
        (lambda pool: pool._findable.__setitem__(2, 1), "free and still findable"),
        (lambda pool: pool._findable.__setitem__(1, 0), "cached and cannot be found"),
    ],
)
def test_the_check_sees_what_is_wrong(corrupt: object, message: str) -> None:
    pool, _ = make_pool(4)
    assert pool.allocate() == 0
    block = allocate_findable(pool)
    pool.release(block)
    pool.check({0: 1})
    corrupt(pool)  # type: ignore[operator]
    with pytest.raises(ConservationError, match=message):
        pool.check({0: 1})
