"""Philox against the published known answers, and the numbers made from it."""

from collections import Counter

import pytest

from twostroke.backends.host.random_stream import philox4x32, uniform

ONES = 0xFFFFFFFF

# The known-answer vectors of Random123 for philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_made_of_the_first_two_words():
    first, second, _, _ = philox4x32((7, 3, 0, 0), (0x89ABCDEF, 0x01234567))
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniform(0x0123456789ABCDEF, sample_index=3, output_index=7) == expected


def test_uniform_lies_below_one():
    largest = ((ONES >> 5) * 2**26 + (ONES >> 6)) * 2.0**-53
    assert largest < 1.0
    assert all(0.0 <= uniform(seed, 0, 0) < 1.0 for seed in range(1000))


def test_every_argument_and_both_halves_of_the_seed_matter():
    base = uniform(5, 1, 2)
    assert base == uniform(5, 1, 2)
    assert len({base, uniform(6, 1, 2), uniform(5 + 2**32, 1, 2), uniform(5, 2, 2), uniform(5, 1, 3)}) == 5


@pytest.mark.parametrize("argument", ["seed", "sample_index", "output_index"])
def test_uniform_along_each_argument(argument, chi_square_limit):
    num_bins, num_draws = 32, 6400
    fixed = {"seed": 11, "sample_index": 0, "output_index": 0}
    bins = Counter(int(num_bins * uniform(**(fixed | {argument: i}))) for i in range(num_draws))
    expected = num_draws / num_bins
    statistic = sum((bins[i] - expected) ** 2 / expected for i in range(num_bins))
    assert statistic < chi_square_limit(num_bins - 1)
