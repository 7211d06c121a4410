"""KV events as vLLM's own types read them. vLLM declares its events as msgspec structs, and its subscribers decode by
the same structs. Those below have the fields and the options of vLLM 0.28 (vllm/distributed/kv_events.py): a batch is
a list, an event in it a map with a tag. Up to 0.23 events were lists, too."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from tests.cluster.follower import Subscription
from tests.cluster.test_kv_events import FREE, known, listened
from tests.kv.test_ledger import BLOCK_SIZE, Ledger
from twostroke.cluster.kv_events import KVEventPublisher

BlockHash = bytes | int


class Event(msgspec.Struct, tag=True, omit_defaults=True, forbid_unknown_fields=True):
    """What is not declared is refused: stricter than vLLM."""


class BlockStored(Event, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(Event, omit_defaults=True, forbid_unknown_fields=True):
    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(Event, omit_defaults=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def published(seed: int) -> tuple[list[bytes], set[int]]:
    """What a publisher sends while an index fills, loses blocks and is cleared; and what the index has in the end."""
    ledger, rng = Ledger((None, 12)), random.Random(seed)
    publisher = KVEventPublisher(listened(ledger), FREE)
    reader = Subscription(publisher.endpoints.events, publisher.endpoints.replay)
    try:
        publisher.publish()
        for number in range(60):
            own = [rng.randrange(100_000, 150_000) for _ in range(rng.randrange(1, 14))]
            ledger.run(ledger.sequence([7] * rng.choice([0, 4, 8]) + own))
            if number == 40:
                ledger.clear_prefixes()
            publisher.publish()
        return [message for _, message in reader.again(0)], known(ledger.index, 0)
    finally:
        reader.close()
        publisher.close()


@pytest.mark.parametrize("seed", range(3))
def test_vllms_types_read_all_of_it_and_would_have_written_the_same_bytes(seed: int) -> None:
    messages, cached = published(seed)
    decode, encode = msgspec.msgpack.Decoder(Batch, strict=True).decode, msgspec.msgpack.Encoder().encode
    batches = [decode(message) for message in messages]
    assert [encode(batch) for batch in batches] == messages
    assert {batch.data_parallel_rank for batch in batches} == {0} and len(batches) > 30
    events = [event for batch in batches for event in batch.events]
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    held: set[BlockHash] = set()
    for event in events:
        if isinstance(event, BlockStored):
            assert event.parent_block_hash is None or event.parent_block_hash in held
            assert len(event.token_ids) == BLOCK_SIZE * len(event.block_hashes) and event.block_size == BLOCK_SIZE
            assert all(isinstance(one, int) and 0 <= one < 1 << 64 for one in event.block_hashes)
            held |= set(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            held -= set(event.block_hashes)
        else:
            held.clear()
    assert held == cached and held
