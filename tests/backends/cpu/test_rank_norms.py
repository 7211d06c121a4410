"""Norms whose numbers lie on several ranks, natively against numpy in float64: each rank's squares, the meeting, and
what each makes of the sums; on every instruction set."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import SHAPE, instruction_set_names, native_code, run

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import StepField, float_bits
from twostroke.backends.cpu.memory import Floats, address_of, float_zeros
from twostroke.backends.cpu.rank_norms import NormedGroup, RankSquares, ScaleField, SquaresField

ROWS, STRIDE, EPSILON, THREADS = 5, 160, 1e-5, 2
OVER_RANKS = replace(SHAPE, norms_over_ranks=True)
PARTS = (slice(16, 64), slice(96, 144))
"""Of a row, what two ranks have; the rest is nobody's."""


def random_rows(seed: int) -> Floats:
    rows = float_zeros(ROWS, STRIDE)
    rows[:] = np.random.default_rng(seed).standard_normal(rows.shape) * 3
    return rows


def execute(isa_name: str, name: str, fields: dict[IntEnum, int]) -> None:
    code = native_code(OVER_RANKS, instruction_sets.choose(isa_name))
    run(code, [(name, fields)], {StepField.NUM_TOKENS: ROWS}, THREADS)


def columns(rows: Floats, part: slice) -> int:
    return address_of(rows) + 4 * part.start


@pytest.mark.parametrize("isa_name", instruction_set_names())
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_norm_over_two_ranks(isa_name: str, is_gated: bool) -> None:
    rows, gates, weight = random_rows(1), random_rows(2), random_rows(3)
    before = rows.copy()
    opened = before.astype(np.float64)
    if is_gated:
        opened *= gates / (1 + np.exp(-gates.astype(np.float64)))
    ranks = [RankSquares(float_zeros(ROWS, 1), (NormedGroup(0, 96),), 1) for _ in PARTS]
    for squares, part in zip(ranks, PARTS, strict=True):
        fields: dict[IntEnum, int] = {
            SquaresField.INPUT: columns(rows, part),
            SquaresField.STRIDE: STRIDE,
            SquaresField.WIDTH: 48,
            SquaresField.SUMS: squares.place(0),
            SquaresField.SUMS_STRIDE: 1,
            SquaresField.ROWS: StepField.NUM_TOKENS,
        }
        if is_gated:
            fields |= {SquaresField.GATE: columns(gates, part), SquaresField.GATE_STRIDE: STRIDE}
        execute(isa_name, "squares", fields)
        np.testing.assert_allclose(squares.sums[:, 0], np.square(opened[:, part]).sum(axis=1), rtol=1e-5)
    total = ranks[0].sums + ranks[1].sums
    for squares, part in zip(ranks, PARTS, strict=True):
        squares.meet(lambda found: np.copyto(found, total), ROWS)
        fields = {
            ScaleField.INPUT: columns(rows, part),
            ScaleField.STRIDE: STRIDE,
            ScaleField.WIDTH: 48,
            ScaleField.WEIGHT: columns(weight, part),
            ScaleField.EPSILON: float_bits(EPSILON),
            ScaleField.TOTAL_WIDTH: 96,
            ScaleField.SUMS: squares.place(0),
            ScaleField.SUMS_STRIDE: 1,
            ScaleField.ROWS: StepField.NUM_TOKENS,
        }
        execute(isa_name, "scale", fields)
    both = np.r_[PARTS]
    mean = np.square(opened[:, both]).mean(axis=1, keepdims=True)
    expected = opened / np.sqrt(mean + EPSILON) * weight[0]
    np.testing.assert_allclose(rows[:, both], expected[:, both], atol=2e-6 * np.abs(expected).max())
    around = np.delete(np.arange(STRIDE), both)
    np.testing.assert_array_equal(rows[:, around], before[:, around])


def test_what_ranks_meet_for() -> None:
    """A rank gives what it counts, in the groups that it has numbers of, of the rows that there are."""
    given = []

    def join(found: Floats) -> None:
        given.append(found.copy())
        found[:] = np.arange(found.size).reshape(found.shape)

    own = RankSquares(random_rows(1)[:, :2].copy(), (NormedGroup(2, 64), NormedGroup(0, 64, counts=False)), 3)
    before = own.sums.copy()
    own.meet(join, 4)
    np.testing.assert_array_equal(given[0], np.stack([np.zeros(4), np.zeros(4), before[:4, 0]], axis=1))
    np.testing.assert_array_equal(own.sums[:4], [[2, 0], [5, 3], [8, 6], [11, 9]])
    np.testing.assert_array_equal(own.sums[4:], before[4:])
