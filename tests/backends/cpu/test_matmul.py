"""Every kind of tile on every instruction set this machine has, against numpy in float64."""

from __future__ import annotations

from enum import IntEnum
from functools import cache

import numpy as np
import pytest
from tests.backends.cpu.native import EVERYWHERE, SHAPE, instruction_set_names, native_code, run, shape_with, tile_cases
from tests.backends.cpu.random_weights import random_tensor
from tests.backends.cpu.unpacking import from_bf16, middles, to_bf16, unpack

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import (
    FEW_ROWS,
    MOST_LACKING_ROWS,
    START_MIDDLE,
    GatedField,
    MatmulField,
    NormField,
    StepField,
)
from twostroke.backends.cpu.kernels.matmul import gated_name, matmul_name
from twostroke.backends.cpu.memory import Arena, address_of, float_zeros, padded
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.packing import PackedMatrix, pack, packed_bytes
from twostroke.backends.cpu.tile_kinds import TileKind
from twostroke.models.weights.tensor import WeightKind

MANY = FEW_ROWS + 5
"""Rows that are worth opening a panel for, and a few more."""
KINDS = {kind: WeightKind[kind.name] for kind in TileKind}


def depth_of(kind: TileKind) -> int:
    return {256: 512, 64: 192}.get(KINDS[kind].block_values, 160)


def prepare_fields(inputs: np.ndarray) -> dict[IntEnum, int]:
    return {
        NormField.INPUT: address_of(inputs),
        NormField.WIDTH: inputs.shape[1],
        NormField.ROWS: StepField.NUM_TOKENS,
    }


def random_inputs(rows: int, depth: int) -> np.ndarray:
    rng = np.random.default_rng(rows)
    inputs = float_zeros(rows, depth)
    inputs[:] = rng.standard_normal((rows, depth)) * rng.uniform(0.1, 10, (rows, 1))
    peaks = rng.integers(0, depth, max(1, depth // 64))  # some groups have a peak, at any place, the others mostly not
    inputs[:, peaks] *= 50
    return inputs


@cache
def packed(kind: TileKind, outputs: int, depth: int, count: int = 1) -> PackedMatrix:
    """So many random matrices below each other. Nobody writes to them: tests of one shape share them."""
    tensors = [random_tensor(KINDS[kind], outputs, depth, seed) for seed in range(count)]
    return pack(tensors, Arena(packed_bytes(kind, count * outputs, depth)))


@cache
def unpacked(kind: TileKind, outputs: int, depth: int, count: int = 1) -> np.ndarray:
    return unpack(packed(kind, outputs, depth, count)).astype(np.float64)


def multiplied(inputs: np.ndarray, operand: Operand, matrix: PackedMatrix, weights: np.ndarray) -> np.ndarray:
    """In float64, over the activations as they were quantised. Where weights have minimums, the sum of a group meets
    the middle of its weights in bf16, both of them rounded: that is the arithmetic, and it is asked for exactly."""
    if not matrix.kind.is_quantised:
        return inputs.astype(np.float64) @ weights.T
    restored = operand.restored()
    sums = restored.reshape(len(inputs), -1, 32).sum(axis=2)  # [rows, groups]
    exact, rounded = middles(matrix), from_bf16(to_bf16(middles(matrix)))
    kept_sums = from_bf16(operand.sums[:, : sums.shape[1]])
    assert np.abs(kept_sums - sums).max() <= np.abs(sums).max() / 256
    return restored @ weights.T + kept_sums @ rounded.astype(np.float64).T - sums @ exact.astype(np.float64).T


def product(
    isa_name: str,
    kind: TileKind,
    rows: int,
    *,
    depth: int = 0,
    outputs: int = 112,
    bias: bool = False,
    accumulate: bool = False,
    threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """(ours, numpy's), over the activations as they were quantised."""
    rng = np.random.default_rng(rows)
    depth, width = depth or depth_of(kind), padded(outputs, 32)
    matrix = packed(kind, outputs, depth)
    inputs, operand = random_inputs(rows, depth), Operand(rows, depth)
    written, bias_values = float_zeros(rows + MOST_LACKING_ROWS, width), float_zeros(width)
    written[:] = np.nan  # what lies in rows that are not there does not matter
    output = written[:rows]
    output[:] = held = rng.standard_normal((rows, width)).astype(np.float32)
    bias_values[:] = rng.standard_normal(width)
    multiply: dict[IntEnum, int] = {
        MatmulField.WEIGHTS: address_of(matrix.data),
        MatmulField.DEPTH: depth,
        MatmulField.NUM_TILES: matrix.num_tiles,
        MatmulField.ROWS: StepField.NUM_TOKENS,
        MatmulField.OUTPUT: address_of(output),
        MatmulField.OUTPUT_STRIDE: width,
        MatmulField.BIAS: address_of(bias_values) if bias else 0,
        MatmulField.ACCUMULATE: int(accumulate),
    }
    every = operand.fields(floats=True, quantised=True, halves=True)
    operations = [("prepare", prepare_fields(inputs) | every), (matmul_name(kind), multiply | every)]
    run(native_code(shape_with(kind), instruction_sets.choose(isa_name)), operations, {0: rows}, threads)

    assert np.abs(operand.restored() - inputs).max() <= operand.scales.max() * 0.501
    expected = multiplied(inputs, operand, matrix, unpacked(kind, outputs, depth))[:, :outputs]
    expected += bias_values[:outputs] if bias else 0
    expected += held[:, :outputs] if accumulate else 0
    return output[:, :outputs], expected


def assert_near(ours: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(ours - expected).max() < 4e-5 * np.abs(expected).max()


@pytest.mark.parametrize(("isa_name", "kind"), tile_cases())
@pytest.mark.parametrize("rows", [1, 2, 7, 31, MANY])
def test_products(isa_name: str, kind: TileKind, rows: int) -> None:
    assert_near(*product(isa_name, kind, rows))


@pytest.mark.parametrize(("isa_name", "kind"), tile_cases())
def test_bias_and_accumulation(isa_name: str, kind: TileKind) -> None:
    for rows in (1, 3):
        assert_near(*product(isa_name, kind, rows, bias=True, accumulate=True))


@pytest.mark.parametrize("rows", [1, 18, MANY])
def test_rows_that_are_kept_apart(rows: int) -> None:
    assert Operand(3, 2048).quantised.strides[0] == 2048 + 64
    assert_near(*product(instruction_set_names()[0], TileKind.Q4_1, rows, depth=2048, outputs=32))


@pytest.mark.parametrize("outputs", [1, 16, 33, 112])
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_shares_the_work(outputs: int, threads: int) -> None:
    name = instruction_set_names()[0]
    for rows in (1, 9, 16 * threads - 4, 16 * threads - 1, 16 * threads):
        alone, expected = product(name, TileKind.Q4_1, rows, outputs=outputs)
        shared, _ = product(name, TileKind.Q4_1, rows, outputs=outputs, threads=threads)
        assert_near(alone, expected)
        assert np.array_equal(alone, shared)


def gated(isa_name: str, kind: TileKind, inputs: np.ndarray, threads: int = 1) -> tuple[Operand, np.ndarray]:
    """(what the gated product wrote, numpy's) for 96 outputs."""
    depth = inputs.shape[1]
    matrix = packed(kind, 96, depth, count=2)
    operand, target = Operand(len(inputs), depth), Operand(len(inputs), 96)
    multiply: dict[IntEnum, int] = {
        GatedField.WEIGHTS: address_of(matrix.data),
        GatedField.UP_BYTES: matrix.data[:6].nbytes,
        GatedField.DEPTH: depth,
        GatedField.NUM_TILES: 6,
        GatedField.ROWS: StepField.NUM_TOKENS,
    }
    every = operand.fields(floats=True, quantised=True, halves=True)
    multiply |= every | target.target_fields(floats=True, quantised=True, halves=True)
    name = gated_name(kind)
    operations = [("prepare", prepare_fields(inputs) | every), (name, multiply)]
    run(native_code(shape_with(kind), instruction_sets.choose(isa_name)), operations, {0: len(inputs)}, threads)
    gate, up = np.split(multiplied(inputs, operand, matrix, unpacked(kind, 96, depth, count=2)), 2, axis=1)
    assert SHAPE.activation == "gelu_tanh"
    return target, gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


@pytest.mark.parametrize(("isa_name", "kind"), tile_cases())
@pytest.mark.parametrize("rows", [1, 11, MANY])
def test_gated_products(isa_name: str, kind: TileKind, rows: int) -> None:
    inputs = random_inputs(rows, depth_of(kind))
    target, expected = gated(isa_name, kind, inputs, threads=2)
    assert_near(target.floats, expected)
    numbers = np.rint(target.restored().reshape(rows, -1, 2, 16) / target.scales[..., None, None])
    sums = numbers.sum(axis=3).astype(np.int32)
    assert np.array_equal(target.half_offsets, -32 * sums.reshape(rows, -1))
    assert np.array_equal(target.origins.view(np.int32) - target.starts, START_MIDDLE * sums.sum(axis=2))
    assert np.abs(target.restored() - target.floats).max() <= target.scales.max() * 0.501


@pytest.mark.parametrize(("isa_name", "kind"), tile_cases())
def test_a_row_has_the_same_bits_in_any_company(isa_name: str, kind: TileKind) -> None:
    """Tiles of every height and panels that were opened: the same operations in the same order."""
    inputs = random_inputs(MANY, depth_of(kind))
    whole, _ = gated(isa_name, kind, inputs)
    for first, last in ((0, 1), (0, 3), (3, 34), (40, 53)):
        part = float_zeros(last - first, inputs.shape[1])
        part[:] = inputs[first:last]
        assert np.array_equal(gated(isa_name, kind, part)[0].floats, whole.floats[first:last])


@pytest.mark.skipif(
    not {"avx512-vnni", "avx2"} <= set(instruction_set_names()), reason="needs a machine with AVX512-VNNI"
)
@pytest.mark.parametrize("kind", EVERYWHERE)
def test_instruction_sets_that_fuse_agree_to_the_bit(kind: TileKind) -> None:
    for rows in (1, 7):
        assert np.array_equal(product("avx512-vnni", kind, rows)[0], product("avx2", kind, rows)[0])
