"""The order of turns and the figures that are read off them, by counting and by drawing."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice, pairwise

import pytest

from bench.watching import Side, balanced_orders, lost_percent, median_interval, report


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_each_side_has_every_place_and_follows_each_other_equally_often(number: int) -> None:
    orders = list(islice(balanced_orders(number), 2 * number))
    assert all(sorted(order) == list(range(number)) for order in orders)
    places = Counter((place, side) for order in orders for place, side in enumerate(order))
    assert len(places) == number**2 and set(places.values()) == {2}
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert len(follows) == number * (number - 1) and len(set(follows.values())) == 1


def test_orders_go_on_without_an_end() -> None:
    orders = list(islice(balanced_orders(4), 16))
    assert orders[8:] == orders[:8]


@pytest.mark.parametrize(("number", "low", "high"), [(5, 1, 5), (6, 1, 6), (20, 6, 15), (50, 18, 33)])
def test_the_interval_has_the_ranks_of_the_tables_for_the_sign_test(number: int, low: int, high: int) -> None:
    assert median_interval(list(range(number, 0, -1))) == (low, high)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(7)
    samples = [[draw.lognormvariate(0.0, 1.0) for _ in range(25)] for _ in range(2000)]
    held = sum(low <= 1.0 <= high for low, high in map(median_interval, samples))
    assert 0.95 <= held / len(samples) <= 0.975  # 25 tosses: the exact share is 0.957


def test_what_is_lost_is_a_share_of_the_same_round() -> None:
    assert lost_percent([98.0, 210.0], [100.0, 200.0]) == pytest.approx([2.0, -5.0])


def test_watched_turns_are_held_to_both_of_nobody_and_nobody_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    sides = [
        Side(0, [99.0] * 8, {"API": 0.08}),
        Side(0, [101.0] * 8, {"API": 0.08}),
        Side(10, [95.0] * 8, {"API": 0.16}, seen_bytes=160_000),
    ]
    report(sides, 1000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == " 10 viewers  95 tokens/s, 2 kB to each, us a token: API 20.0"
    assert lines[4].split()[:6] == ["nobody", "against", "nobody", "-2.02", "[-2.02,", "-2.02]"]
    assert lines[5].split()[:6] == ["10", "against", "nobody", "+5.00", "[+5.00,", "+5.00]"]
