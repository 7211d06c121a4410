"""Answers are the same with drafts and without, token for token and logprob for logprob: whoever drafts, however many
drafts hold, in any company."""

from __future__ import annotations

import pytest

from tests.speculation.cases import MANY, WAYS, MakeCase, check, check_company, drafters_of
from twostroke.speculation.methods import TEXT_DRAFTERS


def test_requests_have_every_feature_and_every_end(make_case: MakeCase) -> None:
    case = make_case("cpu", 200)
    ends = {sample.end[0] for sample in case.plain.samples.values() if sample.end is not None}
    assert ends == {"stop", "length"}
    assert sum(sample.end is not None and sample.end[2] is not None for sample in case.plain.samples.values()) >= 15
    asked = [request.sampling for request in case.requests]
    assert {sampling.grammar.kind for sampling in asked if sampling.grammar} == {
        "json_schema",
        "regex",
        "choice",
        "lark",
    }
    assert {sampling.grammar.thought for sampling in asked if sampling.grammar} == {
        *("none", "open", "possible", "harmony")
    }
    closed = [sample for sample in case.plain.samples.values() if "</think>" in sample.text]
    assert len(closed) > 3, "thoughts end"
    held = [request.request_id for request in case.requests if "harmony" in str(request.sampling.grammar)]
    ended = [sample.end for (name, _), sample in case.plain.samples.items() if name in held]
    assert sum(end is not None and end[0] == "stop" for end in ended) >= 3, "messages end, and the last of them"
    wishes = [each.sampling.speculation for each in case.wished(*TEXT_DRAFTERS, "oracle")]
    for method in (None, "off", *TEXT_DRAFTERS, "oracle"):
        assert sum(wish is not None and wish.method == method for wish in wishes) >= 5, method
    assert {wish.max_drafts for wish in wishes if wish is not None} == {None, 0, 1, 3, 9}
    assert sum(wish is None for wish in wishes) >= 50


@pytest.mark.parametrize("way", list(WAYS))
def test_drafts_that_hold_at_random(make_case: MakeCase, way: str) -> None:
    """On the CPU backend, whose bits depend on nothing but what was read."""
    case = make_case("cpu", {"chunked": 200, "tight": MANY}.get(way, 40))
    told = case.play(WAYS[way], drafters_of("all", case), aborts=way != "ample")
    check(told, case.plain)
    held = {count for pairs in told.held.values() for _, count in pairs}
    assert held >= set(range(9 if case.count == 200 else 5)), "every length"
    assert told.held["grammar"]
    check_company(told, way, "oracle")


@pytest.mark.parametrize("way", ["cached", "tight"])
def test_each_request_has_the_drafts_that_it_wishes(make_case: MakeCase, way: str) -> None:
    """With those beside it that wish otherwise (`is_as_wished`), and behind prefixes that others wrote."""
    case = make_case("cpu", MANY)
    told = case.play(WAYS[way], drafters_of("all", case, 0.6))
    check(told, case.plain)
    check_company(told, way, "suffix", "oracle")
    assert told.held["ngram"], "where a request names it"
    if way == "cached":
        wishes = {each.request_id: each.sampling.speculation for each in case.wished(*TEXT_DRAFTERS, "oracle")}
        found = [wishes[request_id] for request_id, count in told.cached.items() if count]
        assert sum(wish is not None and wish.is_off for wish in found) >= 3
        assert sum(wish is None or not wish.is_off for wish in found) >= 6
