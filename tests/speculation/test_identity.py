"""Answers are the same with drafts and without, token for token and logprob for logprob: whoever drafts, however many
drafts hold, in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest

from tests.speculation.oracle import Oracle
from tests.speculation.random_requests import Sample, Told, play, random_requests, with_stops
from tests.speculation.tiny import Sizes, make_checkpoint, make_engine, make_tokenizer
from twostroke.core.request import Request
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.weights.tensor import WeightKind
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.methods import TEXT_DRAFTERS

WAYS = {
    "ample": Sizes(step_tokens=256, num_blocks=200, prefix_caching=False),
    "cached": Sizes(step_tokens=256, num_blocks=200),
    "chunked": Sizes(step_tokens=24),
    "step by step": Sizes(run_ahead=False),
    "tight": Sizes(num_blocks=11, step_tokens=64),
}
"""Tight: a few streams fill it, and some give way."""
KINDS = {"cpu": WeightKind.Q8_0, "reference": WeightKind.F32}
ABORTS = {"r3": 5, "r11": 1, "r17": 9, "r23": 14, "r31": 3}


@dataclass
class Case:
    """Requests, and what they are told one token a step."""

    backend: str
    checkpoint: Checkpoint
    count: int

    @cached_property
    def requests(self) -> list[Request]:
        tokenizer = make_tokenizer()
        free = random_requests(self.count, tokenizer)
        return with_stops(free, self.play(WAYS["ample"], None, free))

    @cached_property
    def plain(self) -> Told:
        return self.play(WAYS["ample"], None, self.requests)

    def play(
        self, sizes: Sizes, drafters: list[Drafter] | None, requests: list[Request] | None = None, aborts: bool = False
    ) -> Told:
        engine = make_engine(self.backend, self.checkpoint, make_tokenizer(), sizes, drafters)
        return play(engine, requests or self.requests, ABORTS if aborts else None)


MakeCase = Callable[[str, int], Case]


@pytest.fixture(scope="module")
def make_case(tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    made: dict[tuple[str, int], Case] = {}

    def make(backend: str, count: int) -> Case:
        if (backend, count) not in made:
            folder: Path = tmp_path_factory.mktemp("tiny")
            made[backend, count] = Case(backend, make_checkpoint(folder, kind=KINDS[backend]), count)
        return made[backend, count]

    return make


def drafters_of(name: str, case: Case, chance: float = 0.9) -> list[Drafter]:
    """Those that need no file by name; `oracle`; or `all` of them."""
    oracle = Oracle(case.plain.answers(), chance)
    if name == "oracle":
        return [oracle]
    if name == "all":
        return [*(make() for make in TEXT_DRAFTERS.values()), oracle]
    return [TEXT_DRAFTERS[name]()]


def without_bits(sample: Sample) -> Sample:
    return replace(sample, logprobs=[], prompt_logprobs=[])


def check(told: Told, plain: Told, *, exact: bool = True) -> None:
    """Those that were aborted have the beginning of what they would have had."""
    assert set(told.samples) == set(plain.samples)
    for key, expected in plain.samples.items():
        got = told.samples[key]
        if got.end is not None and got.end[0] == "abort":
            count = len(got.token_ids)
            assert got.token_ids == expected.token_ids[:count]
            assert not exact or got.logprobs == expected.logprobs[: len(got.logprobs)]
        elif exact:
            assert got == expected, key
        else:
            assert without_bits(got) == without_bits(expected), key


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
    """200 requests on the CPU backend, whose bits depend on nothing but what was read."""
    case = make_case("cpu", 200)
    told = case.play(WAYS[way], drafters_of("all", case), aborts=way != "ample")
    check(told, case.plain)
    held = {count for pairs in told.held.values() for _, count in pairs}
    assert held >= set(range(9)), "every length"
    assert told.held["oracle"] and told.held["grammar"]
    assert told.num_preemptions > 0 if way == "tight" else told.num_cached_tokens > 0 or way == "ample"


@pytest.mark.parametrize("name", TEXT_DRAFTERS)
def test_each_drafter_by_itself(make_case: MakeCase, name: str) -> None:
    case = make_case("cpu", 40)
    told = case.play(WAYS["chunked"], drafters_of(name, case))
    check(told, case.plain)
    assert told.held[name]


@pytest.mark.parametrize("way", ["ample", "tight"])
def test_on_the_reference(make_case: MakeCase, way: str) -> None:
    """Its bits depend on how a prompt is cut: what is drafted may not change a logprob where prompts are read whole."""
    case = make_case("reference", 60)
    told = case.play(WAYS[way], drafters_of("all", case))
    check(told, case.plain, exact=way == "ample")
    assert {count for pairs in told.held.values() for _, count in pairs} >= set(range(5))


@pytest.mark.slow
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("name", [*TEXT_DRAFTERS, "oracle", "all"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("backend", list(KINDS))
def test_all_ways(make_case: MakeCase, backend: str, way: str, name: str, chance: float) -> None:
    if name in TEXT_DRAFTERS and chance:
        pytest.skip("it has no chance to set")
    case = make_case(backend, 400)
    check(case.play(WAYS[way], drafters_of(name, case, chance)), case.plain, exact=backend == "cpu" or way == "ample")
