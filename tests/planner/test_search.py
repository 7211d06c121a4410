"""What is found is the cheapest of all that meet the level: held against trying everything."""

from __future__ import annotations

import math

import pytest

from twostroke.core.errors import BadRequestError
from twostroke.core.formats import Formats
from twostroke.cost.config_shape import dimensions_from_config
from twostroke.cost.devices import DEVICES, find_device
from twostroke.cost.known_shapes import KNOWN_SHAPES
from twostroke.planner.deployment import Deployment
from twostroke.planner.efficiency import expected
from twostroke.planner.estimate import checked_lengths, phases_of
from twostroke.planner.search import Load, ServiceLevel, candidates_of, search, with_replicas

LENGTHS = checked_lengths(2000, 500)
DIMENSIONS = dimensions_from_config(KNOWN_SHAPES["Llama-3.1-70B"].config)
BASES = [
    Deployment("70B", DIMENSIONS, find_device(name), formats=Formats.of(kind))
    for name in ("h100", "h200", "b200", "l40s")
    for kind in ("bf16", "fp8")
]


def test_the_cheapest_by_exhaustion() -> None:
    level, load = ServiceLevel(ttft_s=1.5, tpot_s=0.060), Load(requests_per_s=6.0)
    found, rejected = search(candidates_of(BASES), LENGTHS, level, load)
    best = math.inf
    for base in candidates_of(BASES):
        efficiency = expected(base.device.name, arithmetic=base.arithmetic)
        phases = phases_of(base, efficiency)
        for users in range(1, base.max_users(2500) + 1, 16):
            loaded = phases.loaded(2000, 500, 0, users)
            if level.is_met(loaded):
                replicas = math.ceil(6.0 / loaded.requests_per_s)
                assert base.device.price_per_hour_usd is not None
                best = min(best, replicas * base.devices_per_copy * base.device.price_per_hour_usd)
    assert found[0].usd_per_hour is not None and found[0].usd_per_hour <= best
    assert [one.usd_per_hour for one in found] == sorted(one.usd_per_hour or 0 for one in found)
    assert all(level.is_met(one.loaded) for one in found)
    assert all(one.deployment.replicas * one.loaded.requests_per_s >= 6.0 for one in found)
    assert any(one.reason == "does not fit" for one in rejected)


EIGHT_B = Deployment("8B", dimensions_from_config(KNOWN_SHAPES["Llama-3.1-8B"].config), find_device("h200"))


def test_what_is_shown_is_of_the_load_that_was_asked_about() -> None:
    """By hand: a card for 4.54 USD an hour that writes 500 tokens for each of 360 requests an hour."""
    level, by_rate = ServiceLevel(ttft_s=1.0, tpot_s=0.03), {}
    for rate in (0.1, 5.0):
        (found,), _ = search([EIGHT_B], LENGTHS, level, Load(requests_per_s=rate))
        by_rate[rate] = found
        assert found.loaded.requests_per_s == pytest.approx(rate)
        assert found.usd_per_million_output_tokens == pytest.approx(1e6 * 4.54 / (rate * 500 * 3600))
    alone = phases_of(EIGHT_B, by_rate[0.1].efficiency).loaded(2000, 500, 0, 1)
    assert (by_rate[0.1].loaded.ttft_s, by_rate[0.1].loaded.tpot_s) == (alone.ttft_s, alone.tpot_s)
    assert by_rate[5.0].loaded.tpot_s > 1.3 * alone.tpot_s


def test_users_are_shared_by_the_replicas_that_there_are() -> None:
    level = ServiceLevel(tpot_s=0.012)
    (most,), _ = search([EIGHT_B], LENGTHS, level, Load(users=10**4))
    full = most.loaded.users
    (found,), _ = search([EIGHT_B], LENGTHS, level, Load(users=full + 10))
    assert found.deployment.replicas == 2 and found.loaded.users == math.ceil((full + 10) / 2)


def test_more_replicas_share_a_rate() -> None:
    load = Load(requests_per_s=20.0)
    (found,), _ = search([EIGHT_B], LENGTHS, ServiceLevel(tpot_s=0.03), load)
    more = with_replicas(found, 2 * found.deployment.replicas, LENGTHS, load)
    assert more.loaded.requests_per_s == pytest.approx(found.loaded.requests_per_s / 2)
    assert more.loaded.tpot_s < found.loaded.tpot_s and more.usd_per_hour == pytest.approx(
        2 * (found.usd_per_hour or 0)
    )


def test_a_tighter_level_never_costs_less() -> None:
    costs = []
    for tpot_s in (0.1, 0.05, 0.03):
        found, _ = search(candidates_of(BASES), LENGTHS, ServiceLevel(tpot_s=tpot_s), Load(users=100))
        costs.append(found[0].usd_per_hour or math.inf)
    assert costs == sorted(costs)


def test_what_nothing_meets_says_why() -> None:
    found, rejected = search(candidates_of(BASES), LENGTHS, ServiceLevel(tpot_s=1e-4), Load(users=1))
    assert found == []
    assert any("too slow for one user: TTFT" in one.reason for one in rejected)
    # What fits and is slow comes before what does not fit, whatever either misses by.
    assert [one.fits for one in rejected] == sorted((one.fits for one in rejected), reverse=True)
    for fits in (True, False):
        misses = [one.miss for one in rejected if one.fits is fits]
        assert misses == sorted(misses) and misses
    assert all(one.miss > 1.0 for one in rejected)


def test_devices_without_a_price_come_last() -> None:
    bases = [Deployment("70B", DIMENSIONS, find_device(name), formats=Formats.of("fp8")) for name in ("b300", "b200")]
    found, _ = search(candidates_of(bases), LENGTHS, ServiceLevel(), Load(users=10))
    assert found[0].deployment.device.name == "B200" and found[0].usd_per_million_output_tokens is not None
    assert found[-1].usd_per_hour is None and found[-1].usd_per_million_output_tokens is None


def test_all_devices_at_once_is_quick() -> None:
    bases = [Deployment("70B", DIMENSIONS, device, formats=Formats.of("fp8")) for device in DEVICES]
    found, rejected = search(candidates_of(bases), LENGTHS, ServiceLevel(tpot_s=0.05), Load(users=1000))
    assert len(found) + len(rejected) == len(list(candidates_of(bases)))
    # Apple's chips have no neighbours to share with.
    assert all(one.deployment.tensor_parallel == 1 for one in found if one.deployment.device.vendor == "Apple")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Load(),
        lambda: Load(requests_per_s=1.0, users=1),
        lambda: Load(users=0),
        lambda: Load(requests_per_s=-1.0),
        lambda: ServiceLevel(ttft_s=0.0),
        lambda: ServiceLevel(tpot_s=-1.0),
    ],
)
def test_bad_wishes(make) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BadRequestError):
        make()
