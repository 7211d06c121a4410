"""What answers are expected to add, by those that were measured, and what KV then grows by at most."""

from __future__ import annotations

import random

import pytest

from twostroke.scheduling.output_lengths import LEAST, REMEMBERED, OutputLengths, peak_growth


def test_it_says_nothing_before_it_has_seen_some_and_keeps_classes_apart() -> None:
    lengths = OutputLengths()
    for _ in range(LEAST):
        assert lengths.more("chat", 0, 1000) is None
        lengths.take("chat", 40)
    assert lengths.more("chat", 0, 1000) == 40 and lengths.more("batch", 0, 1000) is None


def test_what_is_to_come_depends_on_what_was_written() -> None:
    lengths = OutputLengths()
    for length in [10] * 50 + [110] * 50:
        lengths.take("", length)
    assert lengths.more("", 0, 1000) == 60
    assert lengths.more("", 10, 1000) == 100, "those of ten are over by then"
    assert lengths.more("", 100, 1000) == 10
    assert lengths.more("", 100, 3) == 3, "no more than it may"
    assert lengths.more("", 200, 1000) == 100, "longer than any: as much again as half of it"


def test_the_oldest_are_forgotten() -> None:
    lengths = OutputLengths()
    for length in [1000] * REMEMBERED + [10] * REMEMBERED:
        lengths.take("", length)
    assert lengths.more("", 0, 5000) == 10
    assert len(lengths._by_level[""]._latest) == len(lengths._by_level[""]) == REMEMBERED


def test_the_mean_is_that_of_the_longer_ones() -> None:
    drawn, lengths = random.Random(3), OutputLengths()
    taken = [drawn.randint(1, 300) for _ in range(REMEMBERED)]
    for length in taken:
        lengths.take("", length)
    for written in (0, 17, 150, 299):
        longer = [length - written for length in taken if length > written]
        assert lengths.more("", written, 10**6) == pytest.approx(sum(longer) / len(longer), abs=0.51)


def test_the_peak_is_that_of_playing_it() -> None:
    drawn = random.Random(1)
    for _ in range(200):
        streams = [(drawn.randint(1, 30), drawn.randint(0, 20)) for _ in range(drawn.randint(1, 6))]
        held = sum(now for now, _ in streams)
        played = [sum(now + turn for now, more in streams if turn <= more) - held for turn in range(21)]
        assert peak_growth(streams) == max(0, *played)
