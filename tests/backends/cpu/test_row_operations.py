"""Norms, activations, soft cap, q/k norm and rope against numpy in float64, on every instruction set."""

from __future__ import annotations

import ctypes
from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import SHAPE, instruction_set_names, native_code, run
from tests.backends.cpu.unpacking import to_bf16

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import (
    BYTE_MIDDLE,
    NOT_FINITE,
    ROWS_APART_BYTES,
    START_MIDDLE,
    ActivationField,
    ColumnsField,
    HighestField,
    NormField,
    RopeField,
    StepField,
    float_bits,
)
from twostroke.backends.cpu.kernels.operation import PEAK_RATIO
from twostroke.backends.cpu.memory import address_of, float_zeros, zeros
from twostroke.backends.cpu.operand import Operand

ROWS, WIDTH, EPSILON = 5, 96, 1e-5
pytestmark = pytest.mark.parametrize("isa_name", instruction_set_names())


def random_rows(width: int = WIDTH, scale: float = 3.0) -> np.ndarray:
    rows = float_zeros(ROWS, width)
    rows[:] = np.random.default_rng(2).standard_normal((ROWS, width)) * scale
    return rows


def norm_fields(inputs: np.ndarray, weight: np.ndarray) -> dict[IntEnum, int]:
    return {
        NormField.INPUT: address_of(inputs),
        NormField.WIDTH: WIDTH,
        NormField.WEIGHT: address_of(weight),
        NormField.EPSILON: float_bits(EPSILON),
        NormField.ROWS: StepField.NUM_TOKENS,
    }


def normed(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    wide = inputs.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + EPSILON) * weight


def execute(isa_name: str, name: str, fields: dict[IntEnum, int], step: dict[int, int] | None = None) -> None:
    run(
        native_code(SHAPE, instruction_sets.choose(isa_name)), [(name, fields)], step or {StepField.NUM_TOKENS: ROWS}, 2
    )


def test_norm(isa_name: str) -> None:
    inputs, weight, operand = random_rows(), random_rows()[0].copy(), Operand(8, WIDTH)
    fields = norm_fields(inputs, weight) | operand.fields(floats=True, quantised=True)
    execute(isa_name, "norm", fields)
    expected = normed(inputs, weight)
    assert np.abs(operand.floats[:ROWS] - expected).max() < 3e-6
    scales = operand.scales[:ROWS]
    restored = operand.restored()[:ROWS]
    assert (np.abs(restored - expected).reshape(ROWS, -1, 32) <= 0.501 * scales[..., None] + 3e-6).all()
    sums = np.rint(restored.reshape(ROWS, -1, 32) / scales[..., None]).sum(axis=2)
    assert np.array_equal(np.log2(scales), np.rint(np.log2(scales)))
    assert np.array_equal(operand.sums[:ROWS, : sums.shape[1]], to_bf16((sums * scales).astype(np.float32)))
    origins = operand.origins.view(np.int32)
    assert np.array_equal(origins[:ROWS] - operand.starts[:ROWS], START_MIDDLE * sums)
    assert np.array_equal(origins[:ROWS] - operand.byte_starts[:ROWS], BYTE_MIDDLE * sums)


def test_norm_of_the_rows_whose_logits_are_wanted(isa_name: str) -> None:
    inputs, weight, operand = random_rows(), random_rows()[0].copy(), Operand(4, WIDTH)
    wanted = np.array([4, 1], dtype=np.int32)
    fields = norm_fields(inputs, weight) | operand.fields(floats=True, quantised=False)
    fields |= {NormField.ROWS: StepField.NUM_LOGITS, NormField.GATHER: 1}
    execute(isa_name, "norm", fields, {StepField.NUM_LOGITS: 2, StepField.LOGIT_ROWS: address_of(wanted)})
    assert np.abs(operand.floats[:2] - normed(inputs[wanted], weight)).max() < 3e-6


def test_rows_whose_logits_are_wanted_as_they_are(isa_name: str) -> None:
    inputs, operand = random_rows(), Operand(4, WIDTH)
    wanted = np.array([4, 1], dtype=np.int32)
    fields = norm_fields(inputs, inputs[0]) | operand.fields(floats=True, quantised=False)
    fields |= {NormField.ROWS: StepField.NUM_LOGITS, NormField.GATHER: 1}
    execute(isa_name, "prepare", fields, {StepField.NUM_LOGITS: 2, StepField.LOGIT_ROWS: address_of(wanted)})
    assert np.array_equal(operand.floats[:2], inputs[wanted])
    assert not operand.floats[2:].any()


def test_norm_add(isa_name: str) -> None:
    inputs, weight, target = random_rows(), random_rows()[0].copy(), random_rows(scale=1.0)
    expected = (target + normed(inputs, weight)) * 0.75
    more = {NormField.ADD_TO: address_of(target), NormField.FACTOR: float_bits(0.75)}
    execute(isa_name, "norm_add", norm_fields(inputs, weight) | more)
    assert np.abs(target - expected).max() < 3e-6


@pytest.mark.parametrize(("in_place", "adds"), [(True, False), (False, False), (False, True)])
def test_norm_of_columns(isa_name: str, in_place: bool, adds: bool) -> None:
    """Three parts of the middle of each row; what lies before and behind them stays."""
    first, width, count = 16, 16, 3
    inputs, weight = random_rows(), random_rows()[0, :width].copy()
    before, output = inputs.copy(), inputs if in_place else float_zeros(ROWS, 2 * WIDTH)
    output[:] = output if in_place else np.random.default_rng(5).standard_normal(output.shape)
    held = output.copy()
    fields: dict[IntEnum, int] = {
        ColumnsField.INPUT: address_of(inputs) + 4 * first,
        ColumnsField.STRIDE: WIDTH,
        ColumnsField.WIDTH: width,
        ColumnsField.COUNT: count,
        ColumnsField.WEIGHT: address_of(weight),
        ColumnsField.EPSILON: float_bits(EPSILON),
        ColumnsField.ROWS: StepField.NUM_TOKENS,
        ColumnsField.OUTPUT: address_of(output) + 4 * first,
        ColumnsField.OUTPUT_STRIDE: output.shape[1],
        ColumnsField.ACCUMULATE: int(adds),
    }
    execute(isa_name, "norm_columns", fields)
    columns = slice(first, first + count * width)
    parts = before[:, columns].reshape(ROWS, count, width)
    expected = normed(parts, weight) + adds * held[:, columns].reshape(parts.shape)
    assert np.abs(output[:, columns].reshape(parts.shape) - expected).max() < 3e-6
    around = np.delete(np.arange(output.shape[1]), columns)
    assert np.array_equal(output[:, around], held[:, around])
    assert in_place or np.array_equal(inputs, before)


@pytest.mark.parametrize("width", [96, 83, 5])
def test_the_highest_of_a_row(isa_name: str, width: int) -> None:
    """What numpy finds; what lies beyond the width does not count, and a broken number anywhere in it is told."""
    inputs = float_zeros(12, WIDTH)
    inputs[:] = np.random.default_rng(4).integers(-40, -30, inputs.shape)  # many ties
    inputs[1], inputs[2, : width - 1] = -3e38, -1.0
    inputs[3, width - 1] = inputs[4, 0] = 7.0
    inputs[5, :width], inputs[6] = -0.0, 0.0
    inputs[5, 3] = 0.0  # equal to -0.0: the first wins
    inputs[:7, width:] = np.nan
    broken = {7: np.nan, 8: -np.nan, 9: np.inf, 10: -np.inf}
    for row, value in broken.items():
        inputs[row, width // 2] = value
    found = zeros((12,), np.int32)
    fields: dict[IntEnum, int] = {
        HighestField.INPUT: address_of(inputs),
        HighestField.STRIDE: WIDTH,
        HighestField.WIDTH: width,
        HighestField.ROWS: StepField.NUM_LOGITS,
        HighestField.OUTPUT: address_of(found),
    }
    execute(isa_name, "highest", fields, {StepField.NUM_LOGITS: 12})
    expected = [NOT_FINITE if row in broken else int(inputs[row, :width].argmax()) for row in range(12)]
    assert found.tolist() == expected


@pytest.mark.parametrize("ratio", [1.0, 1.9, 3.1, 100.0, 127.9, 129.0, 1e6])
def test_one_large_value_costs_the_others_no_precision(isa_name: str, ratio: float) -> None:
    inputs, operand = random_rows(scale=1.0), Operand(8, WIDTH)
    np.clip(inputs, -1, 1, out=inputs)
    inputs[:, [6, 41, 94]] = 1.0
    inputs[:, [5, 40, 95]] = ratio * np.array([1, -1, 1])
    fields = norm_fields(inputs, inputs[0]) | operand.fields(floats=False, quantised=True)
    execute(isa_name, "prepare", fields)
    expected = max(1.0, ratio / 128) / 127 if ratio > PEAK_RATIO else ratio / 127
    expected = 2 ** np.ceil(np.log2(expected))
    assert np.array_equal(operand.scales[:ROWS], np.full_like(operand.scales[:ROWS], expected))
    assert np.abs(operand.restored()[:ROWS] - inputs).max() <= 0.501 * expected


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_number_is_not_quantised_away(isa_name: str, value: float) -> None:
    inputs, operand = random_rows(), Operand(8, WIDTH)
    inputs[3, 40] = value
    fields = norm_fields(inputs, inputs[0]) | operand.fields(floats=False, quantised=True)
    execute(isa_name, "prepare", fields)
    finite = np.isfinite(operand.scales[:ROWS])
    assert not finite[3, 1]
    assert finite.sum() == finite.size - 1


def test_zeros_are_quantised_to_zeros(isa_name: str) -> None:
    inputs, operand = float_zeros(ROWS, WIDTH), Operand(8, WIDTH)
    execute(isa_name, "prepare", norm_fields(inputs, inputs[0]) | operand.fields(floats=False, quantised=True))
    assert not operand.quantised.any()
    assert np.isfinite(operand.scales).all()


def test_gated_activation(isa_name: str) -> None:
    inputs, operand = random_rows(2 * WIDTH, scale=8.0), Operand(8, WIDTH)
    inputs[0, :6] = [-1e30, 1e30, -100.0, 100.0, 0.0, -1e-30]
    fields: dict[IntEnum, int] = {
        ActivationField.INPUT: address_of(inputs),
        ActivationField.STRIDE: 2 * WIDTH,
        ActivationField.UP: address_of(inputs) + 4 * WIDTH,
        ActivationField.UP_STRIDE: 2 * WIDTH,
        ActivationField.WIDTH: WIDTH,
        ActivationField.ROWS: StepField.NUM_TOKENS,
    }
    assert SHAPE.activation == "gelu_tanh"
    execute(isa_name, "gated_gelu_tanh", fields | operand.fields(floats=True, quantised=False))
    gate, up = np.split(inputs.astype(np.float64), 2, axis=1)
    expected = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    assert np.allclose(operand.floats[:ROWS], expected, rtol=2e-6, atol=1e-5)


def test_soft_cap(isa_name: str) -> None:
    values = random_rows(scale=40.0)
    values[0, :4] = [1e30, -1e30, 0.0, 30.0]
    expected = 30 * np.tanh(values.astype(np.float64) / 30)
    fields: dict[IntEnum, int] = {
        ActivationField.INPUT: address_of(values),
        ActivationField.STRIDE: WIDTH,
        ActivationField.ROWS: StepField.NUM_LOGITS,
        ActivationField.CAP: float_bits(30.0),
    }
    execute(isa_name, "soft_cap", fields, {StepField.NUM_LOGITS: ROWS})
    assert np.abs(values - expected).max() < 1e-5


@pytest.mark.parametrize("half", [8, 6, 1])
def test_norm_and_rope_of_queries(isa_name: str, half: int) -> None:
    """Some dimensions may stay unrotated; no KV head here, so nothing is stored."""
    heads, dim = 2, SHAPE.head_dim
    values, weight = random_rows(heads * dim), random_rows()[0].copy()
    positions = np.array([3, 0, 7, 7, 2], dtype=np.int32)
    angles = np.random.default_rng(4).uniform(0, 6, (8, half))
    cosines, sines = float_zeros(8, half), float_zeros(8, half)
    cosines[:], sines[:] = np.cos(angles), np.sin(angles)
    expected = normed(values.reshape(ROWS, heads, dim), weight[:dim])
    turned = expected.copy()
    low, high = expected[..., :half], expected[..., half : 2 * half]
    cosine, sine = (table[positions][:, None].astype(np.float64) for table in (cosines, sines))
    turned[..., :half] = low * cosine - high * sine
    turned[..., half : 2 * half] = high * cosine + low * sine
    slots = zeros((ROWS,), np.int32)
    fields: dict[IntEnum, int] = {
        RopeField.INPUT: address_of(values),
        RopeField.STRIDE: heads * dim,
        RopeField.NUM_HEADS: heads,
        RopeField.Q_NORM: address_of(weight),
        RopeField.EPSILON: float_bits(EPSILON),
        RopeField.COSINES: address_of(cosines),
        RopeField.SINES: address_of(sines),
        RopeField.HALF: half,
        RopeField.GROUP: int(StepField.KV_GROUPS),
    }
    step = {
        StepField.NUM_TOKENS: ROWS,
        StepField.POSITIONS: address_of(positions),
        StepField.KV_GROUPS: address_of(slots),
    }
    execute(isa_name, "rope_and_store", fields, step)
    assert np.abs(values.reshape(turned.shape) - turned).max() < 5e-6


def test_rows_that_stay_lie_apart(isa_name: str) -> None:
    """Each thread's a page after where they would be: what one core fetches ahead is never another's."""
    inputs, operand, shared = float_zeros(32, WIDTH), Operand(32, WIDTH, threads=2), Operand(32, WIDTH)
    inputs[:] = np.random.default_rng(3).standard_normal(inputs.shape)
    fields: dict[IntEnum, int] = {
        NormField.INPUT: address_of(inputs),
        NormField.WIDTH: WIDTH,
        NormField.ROWS: StepField.NUM_TOKENS,
    }
    for target in (operand, shared):
        execute(isa_name, "prepare", fields | target.fields(floats=True, quantised=True), {StepField.NUM_TOKENS: 32})
    for name in ("floats", "quantised", "origins", "starts", "peaks"):
        apart, together = getattr(operand, name), getattr(shared, name)
        assert np.array_equal(apart[:16], together[:16])
        second = (ctypes.c_char * together[16:].nbytes).from_address(address_of(apart[16:]) + ROWS_APART_BYTES)
        assert bytes(second) == together[16:].tobytes()
