import random

import numpy as np
import pytest

from twostroke.cost.online_fit import FORGETTING, PRIOR_WEIGHT, OnlineFit


def draw(num, seed=0):
    generator = random.Random(seed)
    return [[generator.random() for _ in range(4)] for _ in range(num)]


def test_equals_numpys_solution_of_the_decayed_and_regularised_problem():
    rows, truth, prior = draw(60), [0.5, 2.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0]
    noise = random.Random(1)
    targets = [float(np.dot(row, truth)) * noise.uniform(0.9, 1.1) for row in rows]
    fit = OnlineFit(prior)
    for row, target in zip(rows, targets, strict=True):
        fit.observe("only", row, target)
    fit.descend(2000)
    weights = (1 - FORGETTING) ** (np.arange(60)[::-1] / 2)  # of a row; squared, that of its square
    left = np.vstack([np.array(rows) * weights[:, None], np.eye(4) * PRIOR_WEIGHT**0.5])
    right = np.concatenate([np.array(targets) * weights, np.array(prior) * PRIOR_WEIGHT**0.5])
    expected = np.linalg.lstsq(left, right, rcond=None)[0]
    assert (expected > 0).all()  # else the constraint would bind
    assert fit.coefficients == pytest.approx(expected.tolist(), rel=1e-6)


def test_the_sweeps_that_each_observation_pays_for_are_enough():
    truth = [0.5, 2.0, 0.0, 3.0]
    fit = OnlineFit([1.0] * 4)
    for row in draw(300):
        fit.observe("only", row, float(np.dot(row, truth)))
    assert fit.coefficients == pytest.approx(truth, abs=0.02)


def test_no_coefficient_goes_below_zero():
    fit = OnlineFit([1.0, 1.0])
    for low, high in draw_pairs():
        fit.observe("only", [low, high], 2.0 * low - 0.5 * high)
        assert min(fit.coefficients) >= 0.0
    assert fit.coefficients[1] == 0.0


def draw_pairs():
    generator = random.Random(2)
    return [(generator.uniform(0.5, 1.0), generator.uniform(0.1, 0.5)) for _ in range(100)]


def test_a_kind_forgets_its_own_past_and_not_that_of_others():
    fit = OnlineFit([1.0, 1.0])
    for _ in range(100):
        fit.observe("first", [1.0, 0.0], 3.0)
    for _ in range(10_000):
        fit.observe("second", [0.0, 1.0], 5.0)
    assert fit.coefficients == pytest.approx([3.0, 5.0], rel=0.01)
    for _ in range(300):
        fit.observe("second", [0.0, 1.0], 7.0)
    assert fit.coefficients == pytest.approx([3.0, 7.0], rel=0.01)


def test_what_is_never_seen_keeps_its_first_value():
    fit = OnlineFit([1.0, 4.0])
    for _ in range(50):
        fit.observe("only", [1.0, 0.0], 2.0)
    assert fit.coefficients[1] == 4.0
