"""Resolving a config: what is left open is filled in with a reason, what cannot be had is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from twostroke.config import EngineConfig, KVConfig, resolve
from twostroke.core.errors import BadRequestError
from twostroke.core.kv_layout import KVGroupNeed
from twostroke.core.kv_room import sequence_bytes
from twostroke.core.step_sizes import StepSizes
from twostroke.machine import MemorySpace, detect

MEMORY = MemorySpace("this machine", total_bytes=16 << 30, free_beside_weights_bytes=8 << 30, kv_share=0.25)
SUITS = StepSizes(block_size=16, max_tokens_per_step=512, max_running=64)
FULL = KVGroupNeed(layers=tuple(range(30)), window=None, bytes_per_token=23_040)
WINDOWED = KVGroupNeed(layers=tuple(range(30, 60)), window=64, bytes_per_token=23_040)


def test_defaults_come_from_model_and_machine() -> None:
    resolved = resolve(EngineConfig(), 8192, (FULL,), MEMORY, SUITS, 2)
    assert resolved.threads == 2
    assert resolved.max_context == 8192
    assert resolved.kv_bytes <= MEMORY.free_beside_weights_bytes // 4
    assert resolved.layout.groups[0].num_blocks * 16 >= 8192
    assert any("threads" in reason for reason in resolved.reasons)


def test_context_shrinks_to_what_memory_holds_and_says_so() -> None:
    config = EngineConfig(kv=KVConfig(memory_bytes=100 * 16 * 23_040))
    resolved = resolve(config, 8192, (FULL,), MEMORY, SUITS, 2)
    assert resolved.max_context == 1600
    assert resolved.layout.groups[0].num_blocks == 100
    assert any("1600" in reason for reason in resolved.reasons)


def test_an_asked_context_that_does_not_fit_is_refused_with_what_would() -> None:
    config = EngineConfig(max_context=4096, kv=KVConfig(memory_bytes=100 * 16 * 23_040))
    with pytest.raises(BadRequestError, match="1600 would fit"):
        resolve(config, 8192, (FULL,), MEMORY, SUITS, 2)


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(BadRequestError, match="9000 is more than the 8192"):
        resolve(EngineConfig(max_context=9000), 8192, (FULL,), MEMORY, SUITS, 2)


def test_windowed_groups_take_fewer_blocks() -> None:
    config = EngineConfig(max_tokens_per_step=64, kv=KVConfig(memory_bytes=1 << 30))
    layout = resolve(config, 8192, (FULL, WINDOWED), MEMORY, SUITS, 2).layout
    full, windowed = layout.groups
    assert windowed.num_blocks < full.num_blocks / 10
    assert windowed.num_blocks * 16 >= 64 + 2 * 64


def test_states_take_slots_of_a_share_and_their_bytes_once() -> None:
    state = KVGroupNeed(layers=(60,), window=None, bytes_per_token=1_000_000, content="state", values=500_000)
    assert sequence_bytes(SUITS, (FULL, state), 1600) == 1600 * 23_040 + 1_000_000
    config = EngineConfig(max_context=1600, kv=KVConfig(memory_bytes=5 * (1600 * 23_040 + 1_000_000)))
    resolved = resolve(config, 8192, (FULL, state), MEMORY, SUITS, 2)
    blocks, slots = resolved.layout.groups
    assert (slots.num_blocks, slots.is_state, slots.values) == (47, True, 500_000)  # a quarter of the memory
    assert blocks.num_blocks == 386  # what is left: 3.86 sequences of 100 blocks
    assert 0.99 * config.kv.memory_bytes < resolved.kv_bytes <= config.kv.memory_bytes
    assert any("KV 386 blocks of 16 tokens and 47 slots for states" in reason for reason in resolved.reasons)


@pytest.mark.parametrize(
    ("kv_bytes", "state_bytes", "memory", "slots"),
    [
        (23_040, 1_000_000, 1600 * 23_040 + 1_000_000, 1),  # one sequence fits, and nothing else
        (23_040, 1_000_000, 1600 * 23_040 + 3_500_000, 3),
        (100, 1_000_000, 20_000_000, 19),  # states are nearly all that there is
        (100, 1_000, 10_000_000, 8 * SUITS.max_running),  # no more than anybody could want
    ],
)
def test_slots_for_snapshots_leave_one_sequence_its_blocks(
    kv_bytes: int, state_bytes: int, memory: int, slots: int
) -> None:
    full = replace(FULL, bytes_per_token=kv_bytes)
    state = KVGroupNeed(layers=(60,), window=None, bytes_per_token=state_bytes, content="state")
    config = EngineConfig(max_context=1600, kv=KVConfig(memory_bytes=memory))
    resolved = resolve(config, 8192, (full, state), MEMORY, SUITS, 2)
    assert resolved.layout.groups[0].num_blocks >= 100
    assert resolved.layout.groups[1].num_blocks == slots
    assert resolved.kv_bytes <= memory


def test_almost_no_memory_is_refused() -> None:
    with pytest.raises(BadRequestError, match="give more memory to KV"):
        resolve(EngineConfig(kv=KVConfig(memory_bytes=1000)), 8192, (FULL,), MEMORY, SUITS, 2)


@pytest.mark.parametrize("bad", [{"threads": 0}, {"max_running": -1}, {"kv": {"block_size": 16}}])
def test_bad_values_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(BadRequestError):
        EngineConfig(**bad)  # type: ignore[arg-type]


def test_this_machine_is_detected() -> None:
    machine = detect()
    assert machine.threads >= 1
    assert 0 < machine.available_memory_bytes <= machine.total_memory_bytes


@pytest.mark.parametrize(
    "bad", [{"threads": 10**6}, {"max_tokens_per_step": 10**9}, {"max_running": 2**20}, {"threads": "2"}]
)
def test_numbers_beyond_reason_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(BadRequestError, match=f"{next(iter(bad))} must be an integer from 1 to"):
        EngineConfig(**bad)  # type: ignore[arg-type]


def test_more_kv_than_the_machine_has_is_refused() -> None:
    with pytest.raises(BadRequestError, match=r"more than the 17\.2 GB this machine has"):
        resolve(EngineConfig(kv=KVConfig(memory_bytes=17 << 30)), 8192, (FULL,), MEMORY, SUITS, 2)


@pytest.mark.parametrize("kind", ["fp4", "", "F16"])
def test_an_unknown_kv_kind_is_refused(kind: str) -> None:
    with pytest.raises(BadRequestError, match="kind must be one of auto, f32, f16, bf16, fp8, int8, not"):
        KVConfig(kind=kind)


@pytest.mark.parametrize("bad", ["12bit", "", "Packed", None])
def test_an_unknown_form_of_decode_weights_is_refused(bad: object) -> None:
    with pytest.raises(BadRequestError, match="decode_weights must be one of auto, packed, plain, not"):
        EngineConfig(decode_weights=bad)  # type: ignore[arg-type]


def test_kv_tokens_are_those_of_the_blocks() -> None:
    config = EngineConfig(max_tokens_per_step=64, kv=KVConfig(memory_bytes=1 << 30))
    resolved = resolve(config, 8192, (FULL, WINDOWED), MEMORY, SUITS, 2)
    assert resolved.kv_tokens == 16 * resolved.layout.groups[0].num_blocks >= 8192


def test_a_sequence_takes_whole_blocks_and_no_more_than_its_window() -> None:
    assert sequence_bytes(SUITS, (FULL,), 17) == 32 * 23_040
    far = 64 + 2 * 512 + 16
    assert sequence_bytes(SUITS, (FULL, WINDOWED), 8192) == (8192 + far) * 23_040
