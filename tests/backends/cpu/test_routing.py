"""Rows to experts by native code, beside the host's few lines of numpy (`backends/host/routing.py`): every way to
score, ties, corrections and groups; and how rows are laid out expert by expert."""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import numpy as np
import pytest
from tests.backends.cpu.native import SHAPE, instruction_set_names, native_code, run

from twostroke.backends.cpu import isa as instruction_sets
from twostroke.backends.cpu.arguments import MOST_LACKING_ROWS, StepField, float_bits
from twostroke.backends.cpu.memory import address_of, float_zeros, padded, zeros
from twostroke.backends.cpu.routing_arguments import (
    ELSEWHERE,
    GroupField,
    PlanPlace,
    RouteField,
)
from twostroke.backends.host.routing import route
from twostroke.models.spec import MoeSpec, Routing

ROWS = 37
MOES = {
    "softmax": MoeSpec(60, 4, 32, normalise_weights=False),
    "softmax, shares to 1": MoeSpec(8, 2, 32),
    "sigmoid": MoeSpec(64, 6, 32, routing=Routing("sigmoid", share_scale=2.5)),
    "corrected": MoeSpec(33, 5, 32, routing=Routing("sigmoid", has_correction=True)),
    "groups by their best": MoeSpec(64, 6, 32, False, routing=Routing(num_groups=8, groups_per_token=3)),
    "groups by two": MoeSpec(256, 8, 32, routing=Routing("sigmoid", True, 8, 4, ranked_by=2, share_scale=2.5)),
    "all of them": MoeSpec(4, 4, 32),
}


class Routed:
    """What native code makes of a router's numbers."""

    def __init__(self, moe: MoeSpec, logits: np.ndarray, correction: np.ndarray | None, isa: str, threads: int) -> None:
        rows, (experts, per_token) = len(logits), (moe.num_experts, moe.experts_per_token)
        held = moe.held_experts
        wide = float_zeros(rows, padded(experts, 32))
        wide[:, :experts], wide[:, experts:] = logits, 100.0  # what lies behind must not matter
        own_correction = None
        if correction is not None:
            own_correction = float_zeros(padded(experts, 32))
            own_correction[:experts] = correction
        self.chosen, self.places = (zeros((rows, per_token), np.int64) for _ in range(2))
        self.shares = float_zeros(rows, per_token)
        self.plan = zeros((len(PlanPlace) + len(held),), np.int64)
        self.met, self.starts, tally = (zeros((len(held),), np.int64) for _ in range(3))
        routing = moe.routing
        choice: dict[IntEnum, int] = {
            RouteField.LOGITS: address_of(wide),
            RouteField.STRIDE: wide.shape[1],
            RouteField.NUM_EXPERTS: experts,
            RouteField.PER_TOKEN: per_token,
            RouteField.IS_SIGMOID: int(routing.scoring == "sigmoid"),
            RouteField.CORRECTION: address_of(own_correction),
            RouteField.NUM_GROUPS: routing.num_groups,
            RouteField.GROUPS_PER_TOKEN: routing.groups_per_token,
            RouteField.RANKED_BY: routing.ranked_by,
            RouteField.NORMALISES: int(moe.normalise_weights),
            RouteField.SHARE_SCALE: float_bits(routing.share_scale),
            RouteField.ROWS: StepField.NUM_TOKENS,
            RouteField.CHOSEN: address_of(self.chosen),
            RouteField.SHARES: address_of(self.shares),
        }
        groups: dict[IntEnum, int] = {
            GroupField.CHOSEN: address_of(self.chosen),
            GroupField.PER_TOKEN: per_token,
            GroupField.FIRST_HELD: held.start,
            GroupField.NUM_HELD: len(held),
            GroupField.ROWS: StepField.NUM_TOKENS,
            GroupField.PLACES: address_of(self.places),
            GroupField.PLAN: address_of(self.plan),
            GroupField.MET: address_of(self.met),
            GroupField.STARTS: address_of(self.starts),
            GroupField.TALLY: address_of(tally),
        }
        code = native_code(replace(SHAPE, num_experts=experts), instruction_sets.choose(isa))
        run(code, [("choose_experts", choice), ("group_rows", groups)], {StepField.NUM_TOKENS: rows}, threads)


def numbers(moe: MoeSpec, seed: int = 5) -> tuple[np.ndarray, np.ndarray | None]:
    """Some of them equal: rounded to halves."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((ROWS, moe.num_experts)).astype(np.float32)
    logits[::2] = np.round(2 * logits[::2]) / 2
    correction = 0.3 * rng.standard_normal(moe.num_experts).astype(np.float32)
    return logits, correction if moe.routing.has_correction else None


@pytest.mark.parametrize("isa_name", instruction_set_names())
@pytest.mark.parametrize("name", MOES)
def test_rows_choose_as_on_the_host(name: str, isa_name: str) -> None:
    moe = MOES[name]
    logits, correction = numbers(moe)
    chosen, shares = route(moe, logits, correction)
    found = Routed(moe, logits, correction, isa_name, 2)
    assert np.array_equal(found.chosen, chosen)
    np.testing.assert_allclose(found.shares, shares, rtol=2e-6)
    alone = Routed(moe, logits[5:6], correction, isa_name, 1)
    assert np.array_equal(alone.chosen[0], found.chosen[5]) and np.array_equal(alone.shares[0], found.shares[5])


@pytest.mark.parametrize("held", [None, (3, 5), (40, 64)])
def test_rows_are_laid_out_expert_by_expert(held: tuple[int, int] | None) -> None:
    moe = replace(MOES["sigmoid"], held=held)
    logits, _ = numbers(moe)
    found = Routed(moe, logits, None, instruction_set_names()[0], 2)
    first, last = held or (0, moe.num_experts)
    is_here = (found.chosen >= first) & (found.chosen < last)
    assert np.array_equal(found.places == ELSEWHERE, ~is_here)
    met, counts = np.unique(found.chosen[is_here], return_counts=True)
    number = found.plan[PlanPlace.NUM_MET]
    assert np.array_equal(found.met[:number], met - first)
    assert np.array_equal(found.plan[PlanPlace.COUNTS :][:number], counts)
    starts = np.concatenate([[0], np.cumsum(counts + MOST_LACKING_ROWS)])
    assert np.array_equal(found.starts[:number], starts[:-1]) and found.plan[PlanPlace.NUM_ROWS] == starts[-1]
    for expert, start, count in zip(met, starts, counts, strict=False):
        assert np.array_equal(found.places[found.chosen == expert], start + np.arange(count))


def test_no_rows_meet_nobody() -> None:
    moe = MOES["softmax"]
    found = Routed(moe, np.zeros((0, moe.num_experts), np.float32), None, instruction_set_names()[0], 2)
    assert found.plan[PlanPlace.NUM_MET] == found.plan[PlanPlace.NUM_ROWS] == 0


def test_numbers_that_are_not_finite_choose_somebody() -> None:
    """Whoever it is: the row's logits will say that something is wrong."""
    moe = MOES["groups by two"]
    logits = np.full((ROWS, moe.num_experts), np.nan, np.float32)
    found = Routed(moe, logits, np.zeros(moe.num_experts, np.float32), instruction_set_names()[0], 1)
    assert ((found.chosen >= 0) & (found.chosen < moe.num_experts)).all()
    assert np.isnan(found.shares).all()
