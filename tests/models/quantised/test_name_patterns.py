"""Patterns of names: they match what Python's own matcher does, and no pattern takes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.properties import examples

from twostroke.models.quantised.name_patterns import NamePattern, UnreadablePatternError
from twostroke.models.quantised.scheme import Matching, NameList

ATOMS = ["a", "b", r"\.", ".", "[ab]", "[^a]", r"\d", r"\w", "[0-9.]", "^", "$", "(a|b.)", "(?:ab)", "(|a)"]
COUNTS = ["", "", "*", "+", "?", "{2}", "{1,3}", "*?", "{,2}"]
PATTERNS = st.recursive(
    st.lists(st.tuples(st.sampled_from(ATOMS), st.sampled_from(COUNTS)), max_size=4).map(
        lambda parts: "".join(atom + (count if atom not in "^$" else "") for atom, count in parts)
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("|".join),
        st.tuples(inner, st.sampled_from(COUNTS)).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=4,
)


@examples(300)
@given(PATTERNS, st.text("ab.0", max_size=7))
def test_as_python_matches(pattern: str, name: str) -> None:
    expected = re.match(pattern, name) is not None
    for may_be_plain in (True, False):
        assert NamePattern.of(pattern, may_be_plain=may_be_plain).matches(name) == expected


@examples(200)
@given(st.text(max_size=60), st.text(max_size=30))
def test_any_text_is_matched_or_refused(pattern: str, name: str) -> None:
    try:
        NamePattern.of(pattern).matches(name)
    except UnreadablePatternError as error:
        assert 0 < len(str(error)) < 200


AGES = (
    "(a*)*$",
    "(a|aa)+$",
    "(a+)+b",
    "(.*)" * 8 + "x",
    "(a?){30}a{30}$",
    "a?" * 30 + "a" * 30 + "$",
    "(a|a)" * 40 + "b",
)


@pytest.mark.parametrize("pattern", AGES)
def test_patterns_that_python_would_try_for_ages(pattern: str) -> None:
    start = time.process_time()
    assert not NamePattern.of(pattern).matches("a" * 59 + "!")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("(?=a)b", "a part of the kind assert"),
        (r"(a)\1", "a part of the kind groupref"),
        ("(", "is not a regular expression"),
        ("a{100000}", "too many parts"),
        ("((a{50}){50}){50}", "too many parts"),
        ("(){1000000}", "too many parts"),
        ("(?i)a", "sets flags"),
        ("(?i:a)", "sets flags"),
        ("a" * 2000, "has 2000 characters"),
    ],
)
def test_what_cannot_be_matched_is_refused(pattern: str, sentence: str) -> None:
    with pytest.raises(UnreadablePatternError, match=re.escape(sentence)):
        NamePattern.of(pattern)


def test_work_is_bounded_over_all_names() -> None:
    pattern = NamePattern.of("((a|b)*(a|b)*(a|b)*)*c{80}")
    with pytest.raises(UnreadablePatternError, match="takes too long"):
        for _ in range(10**6):
            pattern.matches("ab" * 250)
    with pytest.raises(UnreadablePatternError, match="a name of 600 characters"):
        NamePattern.of("a").matches("a" * 600)


@pytest.mark.parametrize(
    ("entry", "matching", "name", "listed"),
    [
        ("lm_head", Matching.EXACT, "lm_head", True),
        ("mlp.gate", Matching.EXACT, "model.layers.0.mlp.gate", False),
        ("re:.*mlp.gate$", Matching.EXACT, "model.layers.0.mlp.gate", True),
        ("re:.*mlp.gate$", Matching.EXACT, "model.layers.0.mlp.gate_proj", False),
        ("re:mlp.gate", Matching.EXACT, "model.layers.0.mlp.gate", False),  # from the start, as `re.match` has it
        ("mlp.gate", Matching.SEGMENTS, "model.layers.0.mlp.gate", True),
        ("mlp.gate", Matching.SEGMENTS, "model.layers.0.mlp.gate_proj", False),
        ("model.layers.0", Matching.SEGMENTS, "model.layers.0.mlp.up_proj", True),
        ("model.layers.0", Matching.SEGMENTS, "model.layers.01.mlp.up_proj", False),
        ("model.layers.1", Matching.SEGMENTS, "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.self_attn", Matching.SEGMENTS, "model.layers.7.self_attn.q_proj", True),
        ("*mlp.gate", Matching.SEGMENTS, "model.layers.7.mlp.gate", True),
        ("model.layers.0*", Matching.SEGMENTS, "model.layers.0.mlp.gate_proj", True),
        ("gate", Matching.SEGMENTS, "model.layers.0.mlp.gate_proj", False),
    ],
)
def test_lists_of_names(entry: str, matching: Matching, name: str, listed: bool) -> None:
    assert NameList((entry,), matching).has((name,)) == listed
