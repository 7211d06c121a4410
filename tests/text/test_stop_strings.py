from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties import examples
from twostroke.core.errors import BadRequestError
from twostroke.text.stop_strings import StopStringMatcher

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def brute_force(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Grow the text a character at a time; the first moment it ends with a stop string, cut."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end if include else end - max(len(stop) for stop in matching)], True
    return text, False


def feed(matcher: StopStringMatcher, text: str, cuts: list[int]) -> tuple[str, bool]:
    shown, position, index, stopped = "", 0, 0, False
    while position < len(text):
        width = cuts[index % len(cuts)]
        piece, stopped = matcher.push(text[position : position + width])
        shown += piece
        position, index = position + width, index + 1
    return shown + matcher.finish(), stopped


@examples(300)
@given(LETTERS, STOPS, st.lists(st.integers(1, 5), min_size=1, max_size=6), st.booleans())
def test_equals_brute_force_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    assert feed(StopStringMatcher(stops, include), text, cuts) == brute_force(text, stops, include)


@examples(150)
@given(LETTERS, STOPS)
def test_holds_back_no_more_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher, shown = StopStringMatcher(stops), ""
    for position, character in enumerate(text, start=1):
        piece, stopped = matcher.push(character)
        shown += piece
        if stopped:
            return
        held = text[len(shown) : position]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_a_stop_string_over_three_pushes() -> None:
    matcher = StopStringMatcher(["</answer>"])
    assert matcher.push("42</") == ("42", False)
    assert matcher.push("ans") == ("", False)
    assert matcher.push("wer> more") == ("", True)
    assert matcher.stopped_by == "</answer>"
    assert matcher.push("after") == ("", True)
    assert matcher.finish() == ""


def test_what_looked_like_a_stop_is_shown_when_it_is_not() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.push("hello\n\nUse") == ("hello", False)
    assert matcher.push("ful") == ("\n\nUseful", False)
    assert matcher.push("\n") == ("", False)
    assert matcher.finish() == "\n"


def test_include_keeps_the_longest_of_those_that_end_together() -> None:
    assert StopStringMatcher(["b", "ab"], include=True).push("xab!") == ("xab", True)
    assert StopStringMatcher(["b", "ab"]).push("xab!") == ("x", True)


def test_no_stops_hold_nothing_back() -> None:
    assert StopStringMatcher([]).push("abc") == ("abc", False)


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(BadRequestError):
        StopStringMatcher(["a", ""])


def test_long_stop_strings_stay_cheap() -> None:
    matcher = StopStringMatcher(["a" * 20_000 + "b"])
    started_s = time.process_time()
    for _ in range(2000):
        matcher.push("a" * 19)
        matcher.push("c")
    assert time.process_time() - started_s < 5.0


def test_passed_over_while_it_may_not_stop() -> None:
    matcher = StopStringMatcher(["END", "aa"])
    assert matcher.push("one END two aaaa", may_stop=False) == ("one END two aaa", False)
    assert matcher.push(" EN", may_stop=False) == ("a ", False)  # "END" began here, and may be completed later
    assert matcher.push("D three") == ("", True)
    assert matcher.stopped_by == "END"


def test_an_overlap_of_a_passed_over_stop_string_counts() -> None:
    matcher = StopStringMatcher(["aba"])
    assert matcher.push("aba", may_stop=False) == ("ab", False)
    assert matcher.push("ba!") == ("", True)
