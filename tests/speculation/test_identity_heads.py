"""Answers are the same with a head that drafts and without, greedy and seeded, with all features mixed, on both
backends: in batches, chunked, in little KV where streams give way, with prefixes that are found again."""

from __future__ import annotations

import pytest

from tests.speculation.cases import KINDS, MANY, WAYS, Case, MakeCase, check, check_company, drafters_of
from tests.speculation.random_requests import Told
from tests.speculation.tiny_heads import METHODS


def checked(case: Case, way: str, method: str, told: Told) -> None:
    check(told, case.plain, exact=case.backend == "cpu" or way == "ample")
    counts = {held for _, held in told.held[method]}
    assert {0, 1, 2} <= counts, "drafts that hold, and drafts that do not"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", list(KINDS))
def test_a_head_by_itself(make_case: MakeCase, backend: str, method: str) -> None:
    case = make_case(backend, 40)
    checked(case, "ample", method, case.play(WAYS["ample"], [], with_head=method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["chunked", "tight"])
def test_a_head_in_little_room(make_case: MakeCase, way: str, method: str) -> None:
    case = make_case("cpu", MANY if way == "tight" else 40)
    told = case.play(WAYS[way], [], with_head=method)
    checked(case, way, method, told)
    check_company(told, way, method)


@pytest.mark.parametrize("method", [*METHODS, "mtp"])
def test_a_head_beside_all_others(make_case: MakeCase, method: str) -> None:
    """Requests that wish for it, for another, or for none, in little KV."""
    case = make_case("cpu", MANY)
    told = case.play(WAYS["tight"], drafters_of("all", case, 0.3), with_head=method)
    check(told, case.plain)
    check_company(told, "tight", method, "suffix", "oracle")


@pytest.mark.slow
@pytest.mark.parametrize("others", ["none", "all"])
@pytest.mark.parametrize("chance", [0.0, 0.6, 0.95])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("backend", list(KINDS))
def test_all_ways(make_case: MakeCase, backend: str, way: str, method: str, chance: float, others: str) -> None:
    """200 requests, with a head alone, and with one beside all other drafters."""
    case = make_case(backend, 200)
    drafters = [] if others == "none" else drafters_of("all", case, 0.5)
    told = case.play(WAYS[way], drafters, with_head=method, chance=chance, aborts=chance == 0.95)
    check(told, case.plain, exact=backend == "cpu" or way == "ample")
    check_company(told, way, method)
