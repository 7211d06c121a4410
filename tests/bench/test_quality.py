"""Agreement and perplexity, with a fake judge."""

import math

import pytest

from bench.peers.quality import Departure, Quality, _departure, first_difference, perplexity


class Judge:
    """Finds every token but its own, the last one asked about, half as likely as the best."""

    def __init__(self):
        self.asked = []

    def score(self, token_ids):
        self.asked.append(list(token_ids))
        return [(0.0, 0.0)] * (len(token_ids) - 2) + [(math.log(0.25), math.log(0.5))]


def test_the_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 9]) == 1
    with pytest.raises(ValueError):
        first_difference([1, 2, 3], [1, 2])


def test_a_departure_is_judged_at_the_token_that_differs():
    judge = Judge()
    found = _departure(judge, [7, 8], [1, 2, 3], [1, 9, 3])
    assert found == Departure(1, pytest.approx(math.log(2)))
    assert judge.asked == [[7, 8, 1, 9]]
    assert _departure(judge, [7, 8], [1, 2], [1, 2]) == Departure(None)


def test_perplexity_of_even_odds_is_their_number():
    assert perplexity([(math.log(1 / 8), 0.0)] * 5) == pytest.approx(8.0)


def test_what_is_shown():
    quality = Quality([Departure(None), Departure(3, 0.1), Departure(0, 0.4)], None, None)
    assert quality.first_positions == "-, 3, 0"
    assert quality.worst_gap_nats == 0.4
    assert Quality([Departure(None)], 2.0, 1.0).worst_gap_nats is None
