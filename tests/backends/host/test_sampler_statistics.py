"""Draws follow the distribution they claim, and are independent of each other. Seeds are fixed: these never flake."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from twostroke.backends.host.sampler import RowSampler
from twostroke.core.request import Request
from twostroke.core.sampling_params import SamplingParams

LOGITS = np.array([1.0, 0.2, -0.5, 2.0, 0.0, 1.5, -1.0, 0.7, 1.0, -2.0], dtype=np.float32)
NUM_DRAWS = 6000


def first_tokens(sampling):
    """The first token of many requests that differ in their seed alone."""
    return [sampler(seed, sampling).sample(LOGITS).token_id for seed in range(NUM_DRAWS)]


def sampler(seed, sampling, sample_index=0):
    return RowSampler(Request("r", (0,), sampling, seed=seed), sample_index, (), len(LOGITS))


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def statistic(tokens, expected):
    counts = Counter(tokens)
    assert all(expected[token] > 0 for token in counts)
    return sum((counts[i] - len(tokens) * p) ** 2 / (len(tokens) * p) for i, p in enumerate(expected) if p > 0)


def keep(probabilities, ids):
    kept = np.zeros_like(probabilities)
    kept[ids] = probabilities[ids]
    return kept / kept.sum()


# The kept sets are worked out by hand. Probabilities by rank: 3: .33, 5: .20, 0 and 8: .12, 7: .09, 1: .05, 4: .04 ...
EXPECTED = {
    "plain": ({}, softmax(LOGITS)),
    "hot": ({"temperature": 2.0}, softmax(LOGITS / 2)),
    "top_k": ({"top_k": 3}, keep(softmax(LOGITS), [0, 3, 5])),  # 0 and 8 tie: the lower id stays
    "top_p": ({"top_p": 0.7}, keep(softmax(LOGITS), [0, 3, 5, 8])),
    "min_p": ({"min_p": 0.25}, keep(softmax(LOGITS), [0, 3, 5, 7, 8])),
    "bias": ({"logit_bias": {9: 4.0, 3: -100.0}}, softmax(LOGITS + np.eye(10)[9] * 4 - np.eye(10)[3] * 100)),
}


@pytest.mark.parametrize("case", EXPECTED)
def test_goodness_of_fit_over_seeds(case, chi_square_limit):
    parameters, expected = EXPECTED[case]
    tokens = first_tokens(SamplingParams(**parameters))
    assert statistic(tokens, expected) < chi_square_limit(np.count_nonzero(expected > 1e-9) - 1)


def test_goodness_of_fit_would_notice_a_small_error(chi_square_limit):
    tokens = first_tokens(SamplingParams(temperature=1.1))
    assert statistic(tokens, softmax(LOGITS)) > chi_square_limit(len(LOGITS) - 1)


def test_goodness_of_fit_along_one_answer(chi_square_limit):
    row = sampler(1234, SamplingParams())
    tokens = [row.sample(LOGITS).token_id for _ in range(NUM_DRAWS)]
    assert statistic(tokens, softmax(LOGITS)) < chi_square_limit(len(LOGITS) - 1)


def independence(pairs):
    """The chi-square statistic of the table of pairs, and its degrees of freedom; rare tokens are pooled."""
    table = np.zeros((5, 5))
    for first, second in pairs:
        table[min(first, 9) // 2, min(second, 9) // 2] += 1
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    return ((table - expected) ** 2 / expected).sum(), 16


def test_consecutive_positions_are_independent(chi_square_limit):
    row = sampler(77, SamplingParams())
    tokens = [row.sample(LOGITS).token_id for _ in range(2 * NUM_DRAWS)]
    value, degrees = independence(zip(tokens[::2], tokens[1::2], strict=True))
    assert value < chi_square_limit(degrees)


def test_samples_of_one_request_are_independent(chi_square_limit):
    rows = [sampler(77, SamplingParams(n=2), index) for index in (0, 1)]
    value, degrees = independence([[row.sample(LOGITS).token_id for row in rows] for _ in range(NUM_DRAWS)])
    assert value < chi_square_limit(degrees)


def test_neighbouring_seeds_are_independent(chi_square_limit):
    tokens = first_tokens(SamplingParams())
    value, degrees = independence(zip(tokens[::2], tokens[1::2], strict=True))
    assert value < chi_square_limit(degrees)


def test_independence_would_notice_a_link(chi_square_limit):
    row = sampler(77, SamplingParams())
    tokens = [row.sample(LOGITS).token_id for _ in range(NUM_DRAWS)]
    linked = [(a, a if i % 10 == 0 else b) for i, (a, b) in enumerate(pairwise(tokens))]
    value, degrees = independence(linked)
    assert value > chi_square_limit(degrees)
