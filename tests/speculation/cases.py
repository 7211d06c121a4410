"""Random requests as tests of identity play them: one token a step, and with drafts, in several ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from tests.speculation.oracle import Oracle
from tests.speculation.random_requests import Sample, Told, play, random_requests, with_stops, with_wishes
from tests.speculation.tiny import Sizes, make_engine, make_tokenizer
from tests.speculation.tiny_heads import Helped, make_head
from twostroke.backends.host.host_backend import HostBackend
from twostroke.core.request import Request
from twostroke.models.checkpoint import Checkpoint
from twostroke.models.heads import Head
from twostroke.models.weights.tensor import WeightKind
from twostroke.speculation.drafter import Drafter
from twostroke.speculation.methods import TEXT_DRAFTERS

WAYS = {
    "ample": Sizes(step_tokens=256, num_blocks=200, prefix_caching=False),
    "cached": Sizes(step_tokens=256, num_blocks=200),
    "chunked": Sizes(step_tokens=24),
    "step by step": Sizes(run_ahead=False),
    "tight": Sizes(num_blocks=8, step_tokens=64, is_careless=True),
}
"""Tight: a few streams fill it, and many give way."""
KINDS = {"cpu": WeightKind.Q8_0, "reference": WeightKind.F32}
MANY = 120
"""Requests of which many give way in the tight way, whoever drafts for them."""
ABORTS = {"r3": 5, "r11": 1, "r17": 9, "r23": 14, "r31": 3}


@dataclass
class Case:
    """Requests, and what they are told one token a step."""

    backend: str
    checkpoint: Checkpoint
    count: int

    def wished(self, *methods: str) -> list[Request]:
        """The requests as they are played where these draft."""
        return with_wishes(self.requests, methods)

    @cached_property
    def requests(self) -> list[Request]:
        tokenizer = make_tokenizer()
        free = random_requests(self.count, tokenizer)
        return with_stops(free, self.play(WAYS["ample"], None, free))

    @cached_property
    def plain(self) -> Told:
        return self.play(WAYS["ample"], None, self.requests)

    def play(
        self,
        sizes: Sizes,
        drafters: list[Drafter] | None,
        requests: list[Request] | None = None,
        *,
        aborts: bool = False,
        with_model: bool = False,
        with_head: str | None = None,
        chance: float = 0.8,
    ) -> Told:
        """`with_model`: the model drafts for itself, too, its likeliest token at a time. `with_head`: a head drafts,
        and of its drafts the share `chance` is mended to be right."""
        draft_model: Checkpoint | Head | None = self.checkpoint if with_model else None
        if with_head is not None:
            draft_model = make_head(with_head, self.checkpoint.spec)
        around = (lambda head: Helped(head, Oracle(self.plain.answers(), chance))) if with_head else (lambda own: own)
        engine = make_engine(
            self.backend, self.checkpoint, make_tokenizer(), sizes, drafters, draft_model=draft_model, around=around
        )
        requests = self.requests if requests is None else requests
        if drafters is not None:
            requests = with_wishes(requests, engine.draft_methods)
        told = play(engine, requests, ABORTS if aborts else None)
        if drafters is not None:
            assert isinstance(engine.backend, HostBackend) and engine.backend.speculator is not None
            assert engine.backend.speculator.faults == []
        return told


MakeCase = Callable[[str, int], Case]


def drafters_of(name: str, case: Case, chance: float = 0.9) -> list[Drafter]:
    """Those that need no file by name; `oracle`; or `all` of them. `draft` comes with its model."""
    if name == "draft":
        return []
    oracle = Oracle(case.plain.answers(), chance)
    if name == "oracle":
        return [oracle]
    if name == "all":
        return [*(make() for make in TEXT_DRAFTERS.values()), oracle]
    return [TEXT_DRAFTERS[name]()]


def check_company(told: Told, way: str, *methods: str) -> None:
    """What of a way's requests must have happened, else the way shows nothing."""
    if way == "tight":
        assert told.num_preemptions >= 20
    assert told.num_cached_tokens >= 100 or way == "ample"
    for method in methods:
        assert told.num_drafts(method) >= 50, method


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
