"""Limits in work: who is refused, with which numbers, and what they are told to wait."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from tests.server.test_admission import FACTS
from twostroke.core.sampling_params import SamplingParams
from twostroke.server.errors import ApiError
from twostroke.server.messages import Ready
from twostroke.server.metrics import Metrics
from twostroke.server.quotas import Quotas, Work, bounds_of, work_of
from twostroke.server.settings import Limits, ServerSettings


def engine(max_running: int = 64, max_context: int = 2048) -> Ready:
    engine = dataclasses.replace(FACTS.engine, max_running=max_running)
    return replace(FACTS, engine=engine, max_context=max_context)


def settings(num_keys: int = 2, **limits: Any) -> ServerSettings:
    return ServerSettings("small", api_keys=("a", "b", "c")[:num_keys], limits=Limits(**limits))


def refusal(quotas: Quotas, key: int, work: Work, facts: Ready) -> ApiError:
    with pytest.raises(ApiError) as refused:
        quotas.take(key, work, facts)
    return refused.value


def test_work_is_prompts_times_samples_and_all_their_tokens() -> None:
    facts, prompts = engine(max_context=100), [(1, 2, 3), (4, 5)]
    assert work_of(prompts, SamplingParams(n=4, max_tokens=10), facts) == Work(8, 4 * (13 + 12))
    assert work_of(prompts, SamplingParams(n=2), facts) == Work(4, 2 * (100 + 100))  # as long as the context lets it


def test_the_limits_suit_the_engine_unless_they_are_given() -> None:
    bounds = bounds_of(settings(max_queue=256), engine())
    assert (bounds.total_samples, bounds.total_tokens) == (640, 320 * 2048)
    assert (bounds.key_samples, bounds.key_tokens) == (320, 160 * 2048)
    alone = bounds_of(settings(num_keys=1), engine())
    assert alone.key_samples is None and alone.key_tokens is None
    small = bounds_of(settings(max_queue=2), engine(max_running=1))
    assert small.key_samples is not None and small.key_samples >= Limits().max_prompts  # one whole request always fits
    given = bounds_of(settings(max_samples_per_key=3, max_tokens_in_flight=1000), engine())
    assert (given.key_samples, given.total_tokens, given.key_tokens) == (3, 1000, 500)


@pytest.mark.parametrize(
    ("limits", "key", "whose"),
    [
        ({"max_samples_per_key": 10, "max_tokens_per_key": 1000}, 0, "this API key"),
        ({"max_samples_in_flight": 10, "max_tokens_in_flight": 1000}, -1, "this server"),
    ],
)
def test_a_refusal_has_both_numbers_and_the_time_until_there_is_room(
    limits: dict[str, int], key: int, whose: str
) -> None:
    metrics = Metrics()
    quotas, facts = Quotas(settings(**limits), metrics), engine(max_running=4)
    metrics.mean_sample_s = 30.0
    quotas.take(key, Work(8, 800), facts)
    refused = refusal(quotas, key, Work(6, 100), facts)
    assert (refused.status_code, refused.code) == (429, "samples_limit")
    assert refused.message == f"{whose} has 8 samples in flight and may have 10; this request may come to 6"
    assert refused.headers == {"Retry-After": "30"}  # four of eight have to end, four at a time, 30 s each
    refused = refusal(quotas, key, Work(1, 400), facts)
    assert (refused.status_code, refused.code) == (429, "tokens_limit")
    assert refused.message == f"{whose} has 800 tokens in flight and may have 1000; this request may come to 400"
    assert refused.headers == {"Retry-After": "15"}  # 200 tokens are two of eight
    quotas.take(key, Work(2, 200), facts)
    for work in (Work(8, 800), Work(2, 200)):
        quotas.give_back(key, work)
    quotas.take(key, Work(10, 1000), facts)


def test_what_never_fits_is_not_told_to_come_again() -> None:
    quotas = Quotas(settings(max_samples_per_key=10), Metrics())
    refused = refusal(quotas, 0, Work(11, 1), engine())
    assert (
        refused.status_code == 400 and refused.headers is None and "11" in refused.message and "10" in refused.message
    )


def test_one_key_leaves_room_for_another() -> None:
    quotas, facts = Quotas(settings(), Metrics()), engine()
    quotas.take(0, Work(320, 320), facts)
    assert refusal(quotas, 0, Work(1, 1), facts).code == "samples_limit"
    quotas.take(1, Work(320, 320), facts)
