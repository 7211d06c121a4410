"""Where ranks meet: shared memory against the hands of rank 0, bit for bit, in pieces smaller and larger than a slot;
and what a rank that is gone does to the others."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from tests.backends.sharded.thread_ranks import meetings

from twostroke.backends.host.batch import Batch
from twostroke.backends.sharded import meeting as meeting_module
from twostroke.backends.sharded.batch_bytes import from_bytes, to_bytes
from twostroke.backends.sharded.lines import RankLostError
from twostroke.backends.sharded.meeting import Meeting

LIMIT_S = 60.0


def on_all(met: list[Meeting], work: Callable[[Meeting], object]) -> list[object]:
    """What each rank's call gives, or raises."""
    found: list[object] = [None] * len(met)

    def run(rank: int) -> None:
        try:
            found[rank] = work(met[rank])
        except RankLostError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(met))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_and_columns_are_the_same_either_way(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_module, "LEAST_SLOT_VALUES", 50)
    draw = np.random.default_rng(size)
    widths = [7 + rank for rank in range(size)]
    shapes = [(1, 8), (3, 30), (13, 40), (1, 50), (0, 4), (7, 29)] * 3
    sums = [draw.standard_normal((size, *shape)).astype(np.float32) for shape in shapes]
    logits = [draw.standard_normal((rows, sum(widths))).astype(np.float32) for rows in (1, 30, 0, 4)]
    bounds = np.cumsum([0, *widths])

    def work(own: Meeting) -> list[np.ndarray]:
        found = []
        for values in sums:
            total = values[own.rank].copy()
            own.add_up(total)
            found.append(total)
        for whole in logits:
            collected = own.collect(whole[:, bounds[own.rank] : bounds[own.rank + 1]])
            found += [] if collected is None else [collected]
        return found

    by_way = {way: on_all(meetings(widths, way), work) for way in ("shared", "relay")}
    for found in by_way.values():
        for rank, own in enumerate(found):
            assert isinstance(own, list) and len(own) == len(sums) + (len(logits) if rank == 0 else 0)
            for values, total in zip(sums, own, strict=False):
                np.testing.assert_allclose(total, values.sum(axis=0), rtol=1e-5, atol=1e-5)
        for collected, whole in zip(found[0][len(sums) :], logits, strict=True):
            np.testing.assert_array_equal(collected, whole)
    for place in range(len(sums)):
        totals = [own[place] for found in by_way.values() for own in found]
        assert len({total.tobytes() for total in totals}) == 1, "every rank has the same bits, either way"


@pytest.mark.parametrize("way", ["shared", "relay"])
def test_messages_go_to_all_others(way: str) -> None:
    told = [b"first", b"x" * 500_000, b""]

    def work(own: Meeting) -> list[bytes]:
        if own.rank:
            return [bytes(own.hear()) for _ in told]
        for message in told:
            own.tell(message)
        return told

    assert on_all(meetings([1, 1, 1], way), work) == [told] * 3


@pytest.mark.parametrize("way", ["shared", "relay"])
def test_a_rank_that_is_gone_ends_every_wait(way: str) -> None:
    def work(own: Meeting) -> None:
        values = np.ones((2, 3), dtype=np.float32)
        try:
            own.add_up(values)
            if own.rank == 1:
                return
            own.add_up(values)
        finally:
            own.close()

    found = on_all(meetings([1, 1, 1], way), work)
    assert found[1] is None
    assert all(isinstance(one, RankLostError) for one in (found[0], found[2]))


def test_a_batch_arrives_as_it_was_sent() -> None:
    def numbers(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int32)

    tables = tuple(np.arange(60, dtype=np.int32).reshape(3, 20) + group for group in (0, 100))
    batch = Batch(
        token_ids=numbers(5, 6, 7, 8, 9),
        positions=numbers(40, 3, 0, 1, 2),
        num_decodes=2,
        segment_first=numbers(0, 1, 2),
        segment_count=numbers(1, 1, 3),
        segment_start=numbers(40, 3, 0),
        tables=tables,
        logit_rows=numbers(0, 1, 4),
    )
    found = from_bytes(bytearray(to_bytes(batch, block_size=16)))
    assert found.num_decodes == 2
    for name in ("token_ids", "positions", "segment_first", "segment_count", "segment_start", "logit_rows"):
        np.testing.assert_array_equal(getattr(found, name), getattr(batch, name))
    for sent, table in zip(tables, found.tables, strict=True):
        np.testing.assert_array_equal(table, sent[:, :3])  # positions up to 40 lie in three blocks
