"""Every kind of tile on every instruction set this machine has, against numpy in float64."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import code_for, instruction_set_names, run
from tests.backends.cpu.random_weights import random_tensor

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import MatmulField, NormField, StepField, TileKind
from twostroke.backends.cpu.memory import Arena, address_of, float_zeros, padded
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.packing import pack, packed_bytes
from twostroke.models.weights.tensor import WeightKind

DEPTH = 160
KINDS = {kind: WeightKind[kind.name] for kind in TileKind}


def product(
    isa_name: str,
    kind: TileKind,
    rows: int,
    *,
    outputs: int = 112,
    bias: bool = False,
    accumulate: bool = False,
    threads: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """(ours, numpy's), over the activations as they were quantised."""
    rng = np.random.default_rng(rows)
    code = code_for(instruction_sets.choose(isa_name))
    tensor = random_tensor(KINDS[kind], outputs, DEPTH)
    matrix = pack([tensor], Arena(packed_bytes(kind, outputs, DEPTH)))
    inputs = float_zeros(padded(rows, 4), DEPTH)
    inputs[:rows] = rng.standard_normal((rows, DEPTH)) * rng.uniform(0.1, 10, (rows, 1))
    inputs[:rows, [3, 100]] *= 50  # two groups have a peak, the others mostly not
    operand = Operand(padded(rows, 4), DEPTH)
    width = padded(outputs, 32)
    output, bias_values = float_zeros(padded(rows, 4), width), float_zeros(width)
    output[:rows] = held = rng.standard_normal((rows, width)).astype(np.float32)
    bias_values[:] = rng.standard_normal(width)
    prepare: dict[IntEnum, int] = {
        NormField.INPUT: address_of(inputs),
        NormField.WIDTH: DEPTH,
        NormField.ROWS: StepField.NUM_TOKENS,
    }
    multiply: dict[IntEnum, int] = {
        MatmulField.WEIGHTS: address_of(matrix.data),
        MatmulField.DEPTH: DEPTH,
        MatmulField.NUM_TILES: matrix.num_tiles,
        MatmulField.ROWS: StepField.NUM_TOKENS,
        MatmulField.OUTPUT: address_of(output),
        MatmulField.OUTPUT_STRIDE: width,
        MatmulField.BIAS: address_of(bias_values) if bias else 0,
        MatmulField.ACCUMULATE: int(accumulate),
    }
    both = operand.fields(floats=True, quantised=True)
    run(code, [("prepare", prepare | both), (f"matmul_{kind.name.lower()}", multiply | both)], {0: rows}, threads)

    restored = operand.restored()[:rows]
    assert np.abs(restored - inputs[:rows]).max() <= operand.scales[:rows].max() * 0.501
    used = restored if kind.is_quantised else inputs[:rows].astype(np.float64)
    expected = used @ tensor.to_float32().astype(np.float64).T
    expected += bias_values[:outputs] if bias else 0
    expected += held[:, :outputs] if accumulate else 0
    return output[:rows, :outputs], expected


def assert_near(ours: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(ours - expected).max() < 2e-6 * np.abs(expected).max() * np.sqrt(DEPTH)


@pytest.mark.parametrize("isa_name", instruction_set_names())
@pytest.mark.parametrize("kind", list(TileKind))
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_products(isa_name: str, kind: TileKind, rows: int) -> None:
    assert_near(*product(isa_name, kind, rows))


@pytest.mark.parametrize("isa_name", instruction_set_names())
@pytest.mark.parametrize("kind", list(TileKind))
def test_bias_and_accumulation(isa_name: str, kind: TileKind) -> None:
    for rows in (1, 3):
        assert_near(*product(isa_name, kind, rows, bias=True, accumulate=True))


@pytest.mark.parametrize("outputs", [1, 16, 33, 112])
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_any_number_of_threads_shares_the_work(outputs: int, threads: int) -> None:
    name = instruction_set_names()[0]
    for rows in (1, 9):
        alone, expected = product(name, TileKind.Q4_1, rows, outputs=outputs)
        shared, _ = product(name, TileKind.Q4_1, rows, outputs=outputs, threads=threads)
        assert_near(alone, expected)
        assert np.array_equal(alone, shared)


@pytest.mark.parametrize("kind", list(TileKind))
def test_a_row_has_the_same_bits_in_any_company(kind: TileKind) -> None:
    """One row streams packed weights, more rows go by panels: the same operations in the same order."""
    rng = np.random.default_rng(0)
    code = code_for(instruction_sets.choose())
    tensor = random_tensor(KINDS[kind], 64, DEPTH)
    matrix = pack([tensor], Arena(packed_bytes(kind, 64, DEPTH)))
    inputs = float_zeros(12, DEPTH)
    inputs[:] = rng.standard_normal((12, DEPTH))
    results = []
    for rows in (1, 2, 6, 11):
        operand, output = Operand(12, DEPTH), float_zeros(12, 64)
        both = operand.fields(floats=True, quantised=True)
        prepare: dict[IntEnum, int] = {
            NormField.INPUT: address_of(inputs),
            NormField.WIDTH: DEPTH,
            NormField.ROWS: StepField.NUM_TOKENS,
        }
        multiply: dict[IntEnum, int] = {
            MatmulField.WEIGHTS: address_of(matrix.data),
            MatmulField.DEPTH: DEPTH,
            MatmulField.NUM_TILES: matrix.num_tiles,
            MatmulField.ROWS: StepField.NUM_TOKENS,
            MatmulField.OUTPUT: address_of(output),
            MatmulField.OUTPUT_STRIDE: 64,
        }
        run(code, [("prepare", prepare | both), (f"matmul_{kind.name.lower()}", multiply | both)], {0: rows})
        results.append(output[0].copy())
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.skipif(
    not {"avx512-vnni", "avx2"} <= set(instruction_set_names()), reason="needs a machine with AVX512-VNNI"
)
@pytest.mark.parametrize("kind", list(TileKind))
def test_instruction_sets_that_fuse_agree_to_the_bit(kind: TileKind) -> None:
    for rows in (1, 7):
        assert np.array_equal(product("avx512-vnni", kind, rows)[0], product("avx2", kind, rows)[0])
