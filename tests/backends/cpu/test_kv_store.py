"""What the kernels write to KV blocks: rounding, the edges of each kind's range, and blocks that are not there."""

from __future__ import annotations

import mmap
from dataclasses import replace

import numpy as np
import pytest
from tests.backends.cpu.attention_cases import CASES, Attention, Case, each_kind, to_bf16, written
from tests.backends.cpu.native import instruction_set_names
from tests.backends.cpu.resident import needs_pagemap, pages_given

from twostroke.backends.cpu.kv_kind import KVKind
from twostroke.backends.cpu.kv_store import TOUCHED_BYTES, KVStore
from twostroke.core.kv_layout import KVGroup, KVLayout


@needs_pagemap
def test_a_first_conversation_finds_its_memory_given_and_no_more_than_that() -> None:
    """Not a huge page of every layer: zeroing those took six times as long as reading a prompt of 40 tokens."""
    shape, num_layers = CASES["two"].shape, 16
    num_blocks = (4 << 20) // (2 * shape.block_bytes)
    layout = KVLayout(16, (KVGroup(tuple(range(num_layers)), None, num_blocks),))
    store = KVStore(layout, 2, shape)
    store.touch()
    for place in store.places.values():
        given = pages_given(place.memory)
        first = TOUCHED_BYTES // num_layers // mmap.PAGESIZE
        assert given[:first].all()
        assert given.sum() <= first + 2  # pages that a layer shares with its neighbours


@each_kind
def test_stored_values_saturate_and_nan_is_not_stored(kind: KVKind) -> None:
    attention = Attention(replace(CASES["two"], kind=kind), [4])
    attention.projected[0][:] = [[3.4e38], [-np.inf], [np.nan], [1.0]]
    attention._run([(0, 4)], 0, "rope_and_store", 1)
    memory = attention.store.places[0].memory
    if kind is KVKind.F16:
        assert np.isfinite(memory.view(np.float16)).all()
        assert memory.view(np.float16).max() == 65504
    elif kind is KVKind.BF16:
        stored = (memory.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        assert np.isfinite(stored).all()
        assert stored.max() == np.float32(float.fromhex("0x1.fep127"))
    else:
        stored = memory[:, :, attention.case.shape.scales_offset :].view(np.uint16)
        keys, logs = np.moveaxis(stored.reshape(-1, 2, 16), 1, 0)
        assert np.isfinite((keys.astype(np.uint32) << 16).view(np.float32)).all()
        assert keys[:, :2].max() == 0x4401  # 516: 65504 / 127, rounded up to bf16
        assert 65504 / 127 <= 2 ** (logs.view(np.int16)[:, :2].max() / 512) <= 1.02 * 65504 / 127


@pytest.mark.parametrize("isa_name", instruction_set_names())
def test_f16_rounds_to_nearest_even(isa_name: str) -> None:
    """Through the store and back: ties, subnormals, the edges of the range, and many random numbers."""
    case = Case(16, 1, kv_heads=1)
    attention = Attention(case, [48], isa_name)
    rng = np.random.default_rng(3)
    random = np.ldexp(rng.uniform(-1, 1, (48, 48)), rng.integers(-26, 16, (48, 48)))
    special = [2049.0, 2051.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 65503.9, -65504, 6.0e-5, 0.0, -0.0]
    attention.projected[0][:] = random
    attention.projected[0][0, 32 : 32 + len(special)] = special
    attention._run([(0, 48)], 0, "rope_and_store", 1)
    stored = attention.store.places[0].memory.view(np.float16)[attention.tables[0], 0]  # [blocks, K then V]
    values = stored[:, 16 * 16 :].reshape(48, 16)
    keys = stored[:, : 16 * 16].reshape(3, 16, 16).transpose(0, 2, 1).reshape(48, 16)
    assert np.array_equal(values.view(np.uint16), attention.projected[0][:, 32:].astype(np.float16).view(np.uint16))
    assert np.array_equal(keys.view(np.uint16), attention.projected[0][:, 16:32].astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("isa_name", instruction_set_names())
def test_bf16_rounds_to_nearest_even(isa_name: str) -> None:
    attention = Attention(Case(16, 1, kv_heads=1, kind=KVKind.BF16), [48], isa_name)
    rng = np.random.default_rng(3)
    inputs = attention.projected[0]
    inputs[:] = np.ldexp(rng.uniform(-1, 1, inputs.shape), rng.integers(-60, 60, inputs.shape))
    inputs[0, 32:36] = [1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0, 2.0**-126]  # ties, zero, the smallest normal number
    attention._run([(0, 48)], 0, "rope_and_store", 1)
    for index, block in enumerate(attention.tables[0]):
        expected = to_bf16(inputs[16 * index : 16 * index + 16]).view(np.uint32) >> 16
        keys, values = written(attention, int(block))
        assert np.array_equal(keys.reshape(16, 16), expected[:, 16:32])
        assert np.array_equal(values.reshape(16, 16), expected[:, 32:])


def test_a_block_that_was_never_granted_is_refused() -> None:
    attention = Attention(CASES["three, windowed"], [100])
    attention.tables[0, 1] = -1
    attention.attend([(90, 3)])  # it lies behind the window
    with pytest.raises(IndexError, match="never granted"):
        attention.attend([(60, 3)])
