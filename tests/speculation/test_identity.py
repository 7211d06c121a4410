"""Answers are the same with drafts and without, token for token and logprob for logprob: whoever drafts, however many
drafts hold, in any company."""

from __future__ import annotations

import pytest

from tests.speculation.cases import WAYS, MakeCase, check, drafters_of


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
    assert {sampling.grammar.thought for sampling in asked if sampling.grammar} == {"none", "open", "possible"}
    closed = [sample for sample in case.plain.samples.values() if "</think>" in sample.text]
    assert len(closed) > 3, "thoughts end"


@pytest.mark.parametrize("way", list(WAYS))
def test_drafts_that_hold_at_random(make_case: MakeCase, way: str) -> None:
    """On the CPU backend, whose bits depend on nothing but what was read."""
    case = make_case("cpu", 200 if way in ("chunked", "tight") else 40)
    told = case.play(WAYS[way], drafters_of("all", case), aborts=way != "ample")
    check(told, case.plain)
    held = {count for pairs in told.held.values() for _, count in pairs}
    assert held >= set(range(9 if case.count == 200 else 5)), "every length"
    assert told.held["oracle"] and told.held["grammar"]
    assert told.num_preemptions > 0 if way == "tight" else told.num_cached_tokens > 0 or way == "ample"
