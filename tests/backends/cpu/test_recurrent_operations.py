"""Operations of layers that keep a state against numpy in float64, on every instruction set: runs of several sequences,
some that begin, some that go on, and some with drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import pytest
from tests.backends.cpu.native import SHAPE, instruction_set_names, native_code, run

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import KVGroupField, StepField, float_bits
from twostroke.backends.cpu.memory import address_of, float_zeros
from twostroke.backends.cpu.operand import Operand
from twostroke.backends.cpu.recurrent_arguments import (
    ConvolutionField,
    DecayField,
    GatedNormField,
    RecurrenceField,
    RunField,
    StateField,
)
from twostroke.backends.cpu.shape import RecurrentShape, convolution_name

Array = npt.NDArray[np.float64]
pytestmark = pytest.mark.parametrize("isa_name", instruction_set_names())
TAPS, SLOTS = 4, 6
GROUP = int(StepField.KV_GROUPS)


@dataclass(frozen=True)
class Run:
    count: int
    slot: int
    is_first: bool = False
    has_drafts: bool = False


RUNS = (Run(1, 4), Run(3, 1, has_drafts=True), Run(1, 0), Run(5, 3, is_first=True), Run(7, 2))
NUM_ROWS = sum(one.count for one in RUNS)
ASIDE = 2
"""The first place that drafts' states go to."""


def floats(*shape: int, seed: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
    found = float_zeros(*shape)
    found[:] = np.random.default_rng(seed).standard_normal(shape) * scale
    return found


def step(kept: list[npt.NDArray[np.int32]]) -> dict[int, int]:
    records = np.zeros((len(RUNS), len(RunField)), dtype=np.int32)
    tables = np.array([[one.slot, -1] for one in RUNS], dtype=np.int32)
    row = 0
    for number, (record, one) in enumerate(zip(records, RUNS, strict=True)):
        record[RunField.ROW], record[RunField.COUNT], record[RunField.SEGMENT] = row, one.count, number
        record[RunField.IS_FIRST], record[RunField.ASIDE] = one.is_first, ASIDE if one.has_drafts else -1
        row += one.count
    kept += [records, tables]
    return {
        StepField.NUM_TOKENS: NUM_ROWS,
        StepField.NUM_RUNS: len(RUNS),
        StepField.RUNS: address_of(records),
        GROUP + KVGroupField.TABLES: address_of(tables),
        GROUP + KVGroupField.TABLE_STRIDE: 2,
    }


def execute(isa_name: str, name: str, fields: dict[IntEnum, int], rule: str | None = None) -> None:
    kept: list[npt.NDArray[np.int32]] = []
    shape = replace(SHAPE, recurrent=RecurrentShape(TAPS, rule))  # type: ignore[arg-type]
    run(native_code(shape, instruction_sets.choose(isa_name)), [(name, fields)], step(kept), 2)


def state_fields(states: np.ndarray, aside: np.ndarray, part: int) -> dict[IntEnum, int]:
    return {
        StateField.STATES: address_of(states),
        StateField.SLOT_FLOATS: states.shape[1],
        StateField.PART: part,
        StateField.ASIDE: address_of(aside),
        StateField.GROUP: GROUP,
    }


def silu(values: Array) -> Array:
    return values / (1 + np.exp(-values))


@pytest.mark.parametrize("width", [48, 128], ids=["a vector at a time", "several"])
@pytest.mark.parametrize("is_gated", [True, False])
def test_convolutions_change_the_states_of_their_sequences(isa_name: str, is_gated: bool, width: int) -> None:
    stride, part = 3 * width + 16, 16
    values, weight, bias = floats(NUM_ROWS, stride, seed=1), floats(TAPS, width, seed=2), floats(width, seed=3)
    states = floats(SLOTS, part + (TAPS - 1) * width, seed=4)
    aside, output, before = float_zeros(8, states.shape[1]), float_zeros(NUM_ROWS, width), states.copy()
    fields = state_fields(states, aside, part) | {
        ConvolutionField.INPUT: address_of(values),
        ConvolutionField.STRIDE: stride,
        ConvolutionField.WIDTH: width,
        ConvolutionField.IN_GATE: address_of(values) + 4 * width,
        ConvolutionField.OUT_GATE: address_of(values) + 8 * width,
        ConvolutionField.WEIGHT: address_of(weight),
        ConvolutionField.BIAS: address_of(bias),
        ConvolutionField.OUTPUT: address_of(output),
        ConvolutionField.OUTPUT_STRIDE: width,
    }
    execute(isa_name, convolution_name(TAPS, is_gated=is_gated), fields, None if is_gated else "delta")
    wide = values.astype(np.float64)
    inputs = wide[:, :width] * (wide[:, width : 2 * width] if is_gated else 1.0)
    row = 0
    for one in RUNS:
        kept = np.zeros((TAPS - 1, width)) if one.is_first else before[one.slot, part:].reshape(TAPS - 1, width)
        for token in range(one.count):
            window = np.concatenate([kept, inputs[row : row + 1]])
            total = (window * weight).sum(axis=0)
            expected = total * wide[row, 2 * width : 3 * width] if is_gated else silu(total + bias)
            assert np.abs(output[row] - expected).max() < 1e-5
            kept = window[1:]
            place = aside[ASIDE + token - 1] if one.has_drafts and token else states[one.slot]
            if one.has_drafts or token == one.count - 1:
                assert np.abs(place[part:].reshape(kept.shape) - kept).max() < 1e-6
            row += 1
    assert np.array_equal(states[:, :part], before[:, :part]) and np.array_equal(states[5], before[5])


@pytest.mark.parametrize(("is_delta", "is_tiled"), [(True, False), (True, True), (False, False)])
def test_matrices_fade_are_written_to_and_read(isa_name: str, is_delta: bool, is_tiled: bool) -> None:
    heads, heads_a_key, key_dim, value_dim, part = 6, 2, 24, 32, 8
    key_heads, stride = heads // heads_a_key, 512
    values = floats(NUM_ROWS, stride, seed=1, scale=0.3)
    decays, skip = floats(NUM_ROWS, 2, 16, seed=2), floats(16, seed=3)
    decays[:, 0] = 1 / (1 + np.exp(-decays[:, 0]))
    states = floats(SLOTS, part + heads * key_dim * value_dim, seed=4)
    aside, output, before = float_zeros(8, states.shape[1]), float_zeros(NUM_ROWS, heads * value_dim), states.copy()
    places = {"q": 0, "k": key_heads * key_dim, "v": 2 * key_heads * key_dim}
    fields = state_fields(states, aside, part) | {
        RecurrenceField.QUERIES: address_of(values),
        RecurrenceField.KEYS: address_of(values) + 4 * places["k"],
        RecurrenceField.VALUES: address_of(values) + 4 * places["v"],
        RecurrenceField.STRIDE: stride,
        RecurrenceField.DECAYS: address_of(decays),
        RecurrenceField.NUM_HEADS: heads,
        RecurrenceField.HEADS_A_KEY: 0 if is_tiled else heads_a_key,
        RecurrenceField.NUM_KEY_HEADS: key_heads,
        RecurrenceField.KEY_DIM: key_dim,
        RecurrenceField.VALUE_DIM: value_dim,
        RecurrenceField.SKIP: address_of(skip),
        RecurrenceField.OUTPUT: address_of(output),
    }
    execute(isa_name, "recur_delta" if is_delta else "recur", fields, "delta" if is_delta else "mamba")

    def matrices(slot: np.ndarray) -> Array:
        """[heads, key_dim, value_dim]"""
        blocks = slot[part:].reshape(heads, value_dim // 16, key_dim, 16).astype(np.float64)
        return blocks.transpose(0, 2, 1, 3).reshape(heads, key_dim, value_dim)

    row = 0
    for one in RUNS:
        state = np.zeros((heads, key_dim, value_dim)) if one.is_first else matrices(before[one.slot])
        for token in range(one.count):
            wide = values[row].astype(np.float64)
            of_head = np.arange(heads) % key_heads if is_tiled else np.arange(heads) // heads_a_key
            query, key = (
                wide[places[name] :][: key_heads * key_dim].reshape(key_heads, key_dim)[of_head] for name in ("q", "k")
            )
            value = wide[places["v"] :][: heads * value_dim].reshape(heads, value_dim)
            state = state * decays[row, 0, :heads, None, None]
            held = np.einsum("hkv,hk->hv", state, key) if is_delta else 0.0
            state = state + key[:, :, None] * ((value - held) * decays[row, 1, :heads, None])[:, None]
            expected = np.einsum("hkv,hk->hv", state, query) + (0.0 if is_delta else skip[:heads, None] * value)
            assert np.abs(output[row].reshape(heads, value_dim) - expected).max() < 2e-5
            place = aside[ASIDE + token - 1] if one.has_drafts and token else states[one.slot]
            if one.has_drafts or token == one.count - 1:
                assert np.abs(matrices(place) - state).max() < 2e-5
            row += 1
    assert np.array_equal(states[:, :part], before[:, :part]) and np.array_equal(states[5], before[5])


@pytest.mark.parametrize("is_delta", [True, False])
def test_how_far_states_fade(isa_name: str, is_delta: bool) -> None:
    heads, stride, key_heads, key_dim = 20, 64, 3, 32
    values, keys = floats(NUM_ROWS, stride, seed=1, scale=8.0), floats(NUM_ROWS, 256, seed=2)
    bias, rates, output = floats(32, seed=3), np.abs(floats(32, seed=4)), float_zeros(NUM_ROWS, 2, 32)
    before = keys.astype(np.float64)
    fields: dict[IntEnum, int] = {
        DecayField.STEPS: address_of(values),
        DecayField.STRIDE: stride,
        DecayField.STRENGTHS: address_of(values) + 4 * 32,
        DecayField.NUM_HEADS: heads,
        DecayField.STEP_BIAS: address_of(bias),
        DecayField.RATES: address_of(rates),
        DecayField.SHORTEST: float_bits(0.001),
        DecayField.LONGEST: float_bits(9.0),
        DecayField.OUTPUT: address_of(output),
        DecayField.KEYS: address_of(keys),
        DecayField.KEYS_STRIDE: 256,
        DecayField.NUM_KEY_HEADS: key_heads,
        DecayField.KEY_DIM: key_dim,
        DecayField.QUERY_SCALE: float_bits(0.25),
        DecayField.ROWS: StepField.NUM_TOKENS,
    }
    execute(isa_name, "decays_delta" if is_delta else "decays", fields, "delta" if is_delta else "mamba")
    wide = values.astype(np.float64)
    steps = np.clip(np.logaddexp(0.0, wide[:, :heads] + bias[:heads]), 0.001, 9.0)
    assert np.abs(output[:, 0, :heads] - np.exp(-rates[:heads] * steps)).max() < 1e-6
    strengths = 1 / (1 + np.exp(-wide[:, 32 : 32 + heads])) if is_delta else steps
    assert (np.abs(output[:, 1, :heads] - strengths) < 1e-6 * np.maximum(1.0, strengths)).all()
    used = 2 * key_heads * key_dim
    if is_delta:
        parts = before[:, :used].reshape(NUM_ROWS, 2, key_heads, key_dim)
        parts = parts / np.sqrt((parts**2).sum(axis=-1, keepdims=True) + 1e-6)
        parts[:, 0] *= 0.25
        assert np.abs(keys[:, :used] - parts.reshape(NUM_ROWS, used)).max() < 1e-6
    else:
        assert np.array_equal(keys, before)


@pytest.mark.parametrize("name", ["gated_norm", "norm_gated", "prepare_gated"])
def test_gates(isa_name: str, name: str) -> None:
    width, part, stride = 96, 32, 160
    values, gates, weight = floats(NUM_ROWS, width, seed=1), floats(NUM_ROWS, stride, seed=2), floats(width, seed=3)
    operand = Operand(NUM_ROWS, width)
    fields: dict[IntEnum, int] = operand.fields(floats=True, quantised=True) | {
        GatedNormField.INPUT: address_of(values),
        GatedNormField.WIDTH: width,
        GatedNormField.PART: part,
        GatedNormField.GATE: address_of(gates),
        GatedNormField.GATE_STRIDE: stride,
        GatedNormField.WEIGHT: address_of(weight),
        GatedNormField.EPSILON: float_bits(1e-5),
        GatedNormField.ROWS: StepField.NUM_TOKENS,
    }
    before = values.copy()
    execute(isa_name, name, fields, "mamba" if name == "norm_gated" else "delta")
    wide, gate = values.astype(np.float64), gates[:, :width].astype(np.float64)
    if name == "prepare_gated":
        expected = wide / (1 + np.exp(-gate))
    else:
        wide = wide * silu(gate) if name == "norm_gated" else wide
        parts = wide.reshape(NUM_ROWS, -1, part)
        normed = parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + 1e-5)
        expected = normed.reshape(NUM_ROWS, width) * weight * (silu(gate) if name == "gated_norm" else 1.0)
    assert np.abs(operand.floats[:NUM_ROWS] - expected).max() < 1e-5
    assert np.array_equal(values, before), "threads that have copies of their own read it again"
