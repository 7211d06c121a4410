"""Answers are the same with each drafter by itself and without, on both backends; and in every way, among the slow."""

from __future__ import annotations

import pytest

from tests.speculation.cases import KINDS, MANY, WAYS, MakeCase, check, check_company, drafters_of
from twostroke.speculation.methods import TEXT_DRAFTERS


@pytest.mark.parametrize("name", [*TEXT_DRAFTERS, "draft"])
@pytest.mark.parametrize("backend", list(KINDS))
def test_each_drafter_by_itself(make_case: MakeCase, backend: str, name: str) -> None:
    case = make_case(backend, MANY if backend == "cpu" else 40)
    told = case.play(WAYS["ample"], drafters_of(name, case), with_model=name == "draft")
    check(told, case.plain)
    assert told.num_drafts(name) >= (50 if backend == "cpu" or name != "grammar" else 10)


@pytest.mark.parametrize("way", ["chunked", "tight"])
def test_a_model_that_drafts(make_case: MakeCase, way: str) -> None:
    """In little KV, of which it takes its own."""
    case = make_case("cpu", MANY)
    told = case.play(WAYS[way], [], with_model=True)
    check(told, case.plain)
    check_company(told, way, "draft")
    assert sum(held for _, held in told.held["draft"]) > 40


def test_a_model_beside_all_others(make_case: MakeCase) -> None:
    """Requests that wish for it, for another, or for none, in little KV."""
    case = make_case("cpu", MANY)
    told = case.play(WAYS["tight"], drafters_of("all", case, 0.3), with_model=True)
    check(told, case.plain)
    check_company(told, "tight", "draft", "suffix", "oracle")


@pytest.mark.parametrize("way", ["ample", "tight"])
def test_on_the_reference(make_case: MakeCase, way: str) -> None:
    """Its bits depend on how a prompt is cut: what is drafted may not change a logprob where prompts are read whole."""
    case = make_case("reference", 40)
    told = case.play(WAYS[way], drafters_of("all", case))
    check(told, case.plain, exact=way == "ample")
    assert {count for pairs in told.held.values() for _, count in pairs} >= set(range(5))


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("name", [*TEXT_DRAFTERS, "draft", "oracle", "all"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("backend", list(KINDS))
def test_all_ways(make_case: MakeCase, backend: str, way: str, name: str, chance: float) -> None:
    if name in (*TEXT_DRAFTERS, "draft") and chance:
        pytest.skip("it has no chance to set")
    case = make_case(backend, 200)
    told = case.play(WAYS[way], drafters_of(name, case, chance), with_model=name in ("draft", "all"))
    check(told, case.plain, exact=backend == "cpu" or way == "ample")
    is_hopeless = name == "oracle" and not chance  # it says so itself, and is not computed
    check_company(told, way, *(("draft", "suffix") if name == "all" else () if is_hopeless else (name,)))
