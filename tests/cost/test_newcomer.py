"""A line through known points, through noise, and through what only looks like one."""

from __future__ import annotations

import random

import pytest

from twostroke.cost.newcomer import Newcomer, fit_newcomers

LENGTHS = (8, 12, 16, 24, 32, 42, 48, 64, 85, 128, 204, 500, 1536)
HOST_S = 6e-5


def seen(fixed_s: float, s_per_token: float, noise_s: float = 0.0, seed: int = 0) -> list[Newcomer]:
    generator = random.Random(seed)
    found = []
    for length in LENGTHS * 2:
        num_steps, compute_s = -(-length // 512), 2e-3 + 4e-4 * length
        beside_s = fixed_s + s_per_token * length + generator.uniform(-noise_s, noise_s)
        found.append(Newcomer(length, compute_s + num_steps * HOST_S + beside_s, compute_s, num_steps))
    return found


def test_known_costs_are_found() -> None:
    assert fit_newcomers(seen(4e-4, 2e-7), HOST_S) == (pytest.approx(4e-4), pytest.approx(2e-7))
    fixed_s, s_per_token = fit_newcomers(seen(4e-4, 2e-7, noise_s=6e-5, seed=2), HOST_S)
    assert fixed_s == pytest.approx(4e-4, rel=0.1) and s_per_token == pytest.approx(2e-7, rel=0.3)


def test_a_fifth_that_something_else_held_up_does_not_count() -> None:
    points = seen(4e-4, 2e-7, noise_s=2e-5)
    for index in range(0, len(points), 5):
        one = points[index]
        points[index] = Newcomer(one.prompt_tokens, one.ttft_s + 0.05, one.compute_s, one.num_steps)
    fixed_s, s_per_token = fit_newcomers(points, HOST_S)
    assert fixed_s == pytest.approx(4e-4, rel=0.15) and s_per_token == pytest.approx(2e-7, rel=0.5)


def test_neither_part_is_below_nothing() -> None:
    assert fit_newcomers(seen(8e-4, -2e-7), HOST_S)[1] == 0.0
    assert fit_newcomers(seen(-4e-4, -2e-7), HOST_S) == (0.0, 0.0)
    fixed_s, s_per_token = fit_newcomers(seen(-1e-5, 2e-7), HOST_S)
    assert fixed_s == 0.0 and s_per_token == pytest.approx(2e-7)


def test_one_length_tells_a_fixed_part_and_nothing_tells_nothing() -> None:
    assert fit_newcomers(seen(4e-4, 2e-7)[:1] * 3, HOST_S) == (pytest.approx(4e-4 + 8 * 2e-7), 0.0)
    assert fit_newcomers([], HOST_S) == (0.0, 0.0)
