"""Packed matrices hold what the stored ones hold: exactly, or as near as the kind they are repacked to allows."""

from __future__ import annotations

import numpy as np
import pytest
from tests.backends.cpu.random_weights import random_tensor
from tests.backends.cpu.unpacking import unpack

from twostroke.backends.cpu.memory import Arena
from twostroke.backends.cpu.packing import pack, packed_bytes, repacking_note, tile_kind
from twostroke.models.weights.tensor import WeightKind, WeightTensor

EXACT = (WeightKind.F32, WeightKind.F16, WeightKind.BF16, WeightKind.Q8_0, WeightKind.Q4_1, WeightKind.Q4_0)


def packed_values(tensors: list[WeightTensor]) -> np.ndarray:
    kind, depth = tile_kind(tensors[0].kind), tensors[0].shape[1]
    outputs = sum(tensor.shape[0] for tensor in tensors)
    return unpack(pack(tensors, Arena(packed_bytes(kind, outputs, depth))))


@pytest.mark.parametrize("kind", EXACT)
def test_exact_kinds(kind: WeightKind) -> None:
    tensor = random_tensor(kind, 40, 96)  # a tile and a half: padded to two panels
    values = packed_values([tensor])
    assert values.shape == (64, 96)
    assert np.array_equal(values[:40], tensor.to_float32())
    assert not values[40:].any()


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    # Q4_K: a scale rounded to f16 is off by 2^-11, fifteen times over. Q8_0: half a step of the largest of a group.
    [(WeightKind.Q4_K, 2**-10), (WeightKind.Q5_K, 0.5 / 127 + 2**-10), (WeightKind.Q6_K, 0.5 / 127 + 2**-10)],
)
def test_repacked_kinds_are_near(kind: WeightKind, tolerance: float) -> None:
    tensor = random_tensor(kind, 32, 512)
    stored, values = tensor.to_float32(), packed_values([tensor])
    groups = np.abs(stored.reshape(32, -1, 32)).max(axis=2, keepdims=True)
    # Q4_K's two rounded terms may each be larger than their sum.
    scale = np.maximum(groups, np.abs(stored).max() if kind is WeightKind.Q4_K else 0)
    assert (np.abs(values - stored).reshape(32, -1, 32) <= tolerance * scale).all()
    assert repacking_note(kind) is not None


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
