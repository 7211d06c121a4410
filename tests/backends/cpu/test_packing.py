"""Packed matrices hold what the stored ones hold: exactly, or as near as the kind they are repacked to allows."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.cpu.random_weights import random_tensor
from tests.backends.cpu.unpacking import unpack

from twostroke.backends.cpu.memory import Arena
from twostroke.backends.cpu.packing import pack, packed_bytes, repacking_note, tile_kind
from twostroke.models.weights.tensor import BLOCK_KINDS, WeightKind, WeightTensor

ROUNDED = (WeightKind.Q4_K, WeightKind.Q5_K, WeightKind.Q6_K, WeightKind.IQ4_XS, WeightKind.IQ3_XXS, WeightKind.IQ3_S)
ROUNDED += (WeightKind.IQ2_XXS, WeightKind.IQ2_XS, WeightKind.IQ2_S, WeightKind.IQ1_S, WeightKind.IQ1_M)
EXACT = tuple(kind for kind in BLOCK_KINDS if kind not in ROUNDED)


def packed_values(tensors: list[WeightTensor]) -> np.ndarray:
    kind, depth = tile_kind(tensors[0].kind), tensors[0].shape[1]
    outputs = sum(tensor.shape[0] for tensor in tensors)
    return unpack(pack(tensors, Arena(packed_bytes(kind, outputs, depth))))


@pytest.mark.parametrize("kind", EXACT)
def test_exact_kinds(kind: WeightKind) -> None:
    depth = max(96, 2 * kind.block_values)
    tensor = random_tensor(kind, 40, depth)  # a tile and a half: padded to two panels
    values = packed_values([tensor])
    assert values.shape == (64, depth)
    assert np.array_equal(values[:40], tensor.to_float32())
    assert not values[40:].any()


@pytest.mark.parametrize("kind", ROUNDED)
def test_kinds_of_two_scales_are_exact_but_for_those(kind: WeightKind) -> None:
    """Products of two scales are rounded to f16: each of the two terms of a value is off by 2^-11 of itself at most."""
    tensor = random_tensor(kind, 40, 512)
    stored, values = tensor.to_float32(), packed_values([tensor])
    groups = stored.reshape(40, -1, 16)
    # A term may be larger than the value: by no more than what the group's values span, and what lies below them.
    terms = np.ptp(groups, axis=2, keepdims=True) * 32 + np.abs(groups).max(axis=2, keepdims=True)
    assert (np.abs(values[:40].reshape(groups.shape) - groups) <= 2**-11 * terms).all()
    assert not values[40:].any()
    assert repacking_note(kind) is not None


@pytest.mark.parametrize(("kind", "offsets"), [(WeightKind.Q5_K, (0, 2)), (WeightKind.Q6_K, (208,))])
def test_k_kinds_are_exact_where_their_scales_are(kind: WeightKind, offsets: tuple[int, ...]) -> None:
    """With powers of two as outer scales every product fits f16, and every value must be the stored one."""
    tensor = random_tensor(kind, 32, 512)
    blocks = tensor.data.reshape(32, 2, kind.block_bytes).copy()
    for offset in offsets:
        blocks[..., offset : offset + 2] = np.array([2**-6], dtype="<f2").view(np.uint8)
    exact = WeightTensor("weights", kind, tensor.shape, blocks.reshape(32, -1))
    assert np.array_equal(packed_values([exact]), exact.to_float32())


def test_large_matrices_go_slab_by_slab() -> None:
    tensor = random_tensor(WeightKind.Q4_1, 1040, 576)
    assert np.array_equal(packed_values([tensor])[:1040], tensor.to_float32())


def test_matrices_are_stacked() -> None:
    tensors = [random_tensor(WeightKind.Q8_0, outputs, 64, seed=outputs) for outputs in (64, 32, 8)]
    values = packed_values(tensors)
    assert np.array_equal(values[:104], np.concatenate([tensor.to_float32() for tensor in tensors]))


def test_rows_that_are_a_view_of_a_larger_tensor() -> None:
    tensor = random_tensor(WeightKind.Q4_1, 96, 64)
    assert np.array_equal(packed_values([tensor.rows(32, 64)]), tensor.to_float32()[32:64])


def test_an_arena_does_not_hand_out_more_than_it_has() -> None:
    with pytest.raises(MemoryError, match="bytes left"):
        Arena(64).take(4096)
